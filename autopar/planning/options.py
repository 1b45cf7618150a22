"""`PlanOptions`: the options of a plan and of its search, declared once for the library and every command.

Inside a search the same request is `autopar.search.space.dimensions.Constraints`, checked for a model and a cluster.
This module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from autopar.cost_model.interval import DEFAULT_CHANCE, LEAST_CHANCE, MOST_CHANCE
from autopar.errors import InputError, PlanError, Problem, did_you_mean
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.offload import NO_OFFLOAD, OFFLOADS
from autopar.ir.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from autopar.ir.rank_order import ORDERS
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULE_NAMES
from autopar.planning.degrees import nearest_divisors, resolve_degrees
from autopar.search.space.dimensions import Values, checked_values

if TYPE_CHECKING:
    from autopar.cost_model.machine.profile import DeviceProfile

_NOT_DEGREES = ("global_batch", "seq_len")
_DIMENSIONS = {"dp": "dp_shard"}  # an option, and the search dimension with another name
TOP = 5  # plans that a search explains beside the best
TRIALS = 80  # of Optuna, if a pipeline is among the best plans; enough for all variations of most searches


def _option(help_text: str, default: str = "", *, is_searched: bool = True) -> Any:
    """An option of every command. `default` holds without it, except in a search that chooses the option's value."""
    return field(default=None, metadata={"help": help_text, "default": default, "is_searched": is_searched})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """A request for a plan; None leaves a choice to autopar. Fields of the first part are options of every command."""

    pp: int | None = _option("Pipeline-parallel degree: ranks that hold different layers.", "1")
    tp: int | None = _option("Tensor-parallel degree: ranks that split each operator.", "1")
    cp: int | None = _option(
        "Context-parallel degree: ranks that split each sequence. They hold the same parameters and share samples.", "1"
    )
    context: str | None = _option(
        "How attention splits a sequence on cp: heads (a rank has all tokens of some heads), queries (its queries meet "
        "all keys) or ring (keys travel from rank to rank).",
        "the cheapest one, for each block",
    )
    dp: int | None = _option("Data-parallel degree: ranks that shard the state.", "all ranks that pp, tp and cp leave")
    ep: int | None = _option("Expert-parallel degree: ranks of dp that split the experts of a mixture.", "1")
    dispatch: str | None = _option(
        "How rows of tokens meet their experts on ep: exchange (rows travel to the ranks of their experts), gather "
        "(every rank has all tokens) or whole (every rank has all experts).",
        "the cheaper one of exchange and gather",
    )
    dp_replicate: int | None = _option("Replicas of the sharded data-parallel group (hybrid sharding).", "1")
    zero: int | None = _option(
        "ZeRO stage. 0 shards nothing over dp, 1 the optimizer state, 2 also gradients, 3 also parameters.", "3"
    )
    sequence_parallel: bool | None = _option(
        "Require or forbid sequence parallelism on tp.", "used where it is cheaper"
    )
    micro_batch: int | None = _option("Sequences of one data-parallel rank in one micro-batch.", "2")
    accumulate: int | None = _option("Micro-batches of one step.", "1")
    per_micro_batch: bool | None = _option(
        "Average the losses of single micro-batches, as a plain training loop does. Models whose samples depend on "
        "each other (batch norm, contrastive loss) need it to accumulate. The loss differs from the loss of the whole "
        "batch.",
        "off",
        is_searched=False,
    )
    schedule: str | None = _option(f"Schedule of the pipeline: {', '.join(SCHEDULE_NAMES)}.", DEFAULT_SCHEDULE)
    virtual_stages: int | None = _option(
        "Stages that one pipeline rank holds.", "the least number that the schedule takes"
    )
    micro_batches: int | None = _option("Micro-batches of one run of the pipeline.", "twice the stages")
    cut_at: str | None = _option(
        "Module paths at which the second and later stages begin: layers.2,layers.4.", "stages of equal seconds"
    )
    order: str | None = _option(
        f"Order of mesh dimensions over ranks: {' or '.join(ORDERS)}. Ranks of the last dimension are neighbours.",
        ORDERS[0],
    )
    recompute: str | None = _option(
        "Activations that backward computes again: none, selective (of the operators that free many bytes for little "
        "work), full (all activations inside blocks), or auto (the least that fits).",
        "none",
    )
    recompute_blocks: str | None = _option(
        "Recompute only the first k repeated blocks of each stage: one number, or one for every stage such as 3,2,1,0.",
        "all blocks",
    )
    selective_blocks: str | None = _option(
        "With --recompute auto, recompute these blocks of each stage selectively, behind the fully recomputed blocks: "
        "one number, or one for every stage.",
        "the least that fits",
        is_searched=False,
    )
    loss_chunks: int | None = _option(
        "Chunks of tokens in which the logits and the loss are computed, one after the other. 1 is off.", "1"
    )
    offload: str | None = _option(
        f"What is in host memory instead of device memory: {', '.join(OFFLOADS)}.", NO_OFFLOAD
    )
    optimizer: str | None = _option(
        f"The optimizer whose state the memory counts: {', '.join(OPTIMIZERS)}. Another name counts as "
        f"{DEFAULT_OPTIMIZER}.",
        DEFAULT_OPTIMIZER,
        is_searched=False,
    )
    precision: str | None = _option(
        "Dtype of computing, beside float32 master weights: fp32, bf16 or fp16. fp8 and mxfp8 are bf16 with linear "
        "layers of eight bits.",
        "bf16 for models in float32, as the model is written for others and on CPUs",
        is_searched=False,
    )
    reduce_dtype: str | None = _option(
        "Dtype in which ranks sum gradients: fp32, bf16 or fp16.",
        "fp32 with a precision, otherwise the dtype of the gradients",
        is_searched=False,
    )
    global_batch: int | None = _option(
        "Sequences of one optimizer step: dp × micro-batch × micro-batches × accumulate. A number that is not given "
        "follows from the others."
    )
    seq_len: int | None = _option("Tokens of one sequence.", "the model's context, at most 4096", is_searched=False)

    # ---- the search ----

    local_batch: int | None = None  # sequences of each data-parallel rank; values are then of one sequence
    objective: str = "time"
    fix: Mapping[str, Any] = field(default_factory=dict)  # values that a word must have
    forbid: Mapping[str, Any] = field(default_factory=dict)  # values that a word must not have
    top: int = TOP
    trials: int = TRIALS
    seed: int = 0  # of Optuna's sampler
    timeout_s: float | None = None
    chance: float = DEFAULT_CHANCE  # with which a plan must fit
    study: str | None = None
    report: bool = False  # also collect the curves and the graph that only a report draws
    profile: "DeviceProfile | None" = None

    def __post_init__(self) -> None:
        match self.fix.get("precision"):  # it decides the capture, as the option does
            case (str(word),) | str(word) if self.precision is None:
                object.__setattr__(
                    self, "fix", {name: value for name, value in self.fix.items() if name != "precision"}
                )
                object.__setattr__(self, "precision", word)

    def given(self) -> dict[str, Any]:
        """The options of the first part that were given, by name."""
        values = ((name, getattr(self, name)) for name in command_options())
        return {name: value for name, value in values if value is not None}

    def wish(self) -> dict[str, Any]:
        """The given options that are degrees, as `autopar.parallelize(plan=...)` takes them."""
        return {name: value for name, value in self.given().items() if name not in _NOT_DEGREES}

    def joined_with(self, words: Mapping[str, Any]) -> "tuple[PlanOptions, dict[str, Any]]":
        """These options with the words that no search chooses, such as a precision, and the other words."""
        shared = {name for name, o in command_options().items() if not o.metadata["is_searched"]}
        mine = {name: value for name, value in words.items() if name in shared and value is not None}
        for name, value in mine.items():
            if getattr(self, name) not in (None, value):
                raise InputError(f"{name} {getattr(self, name)!r} beside {value!r} in the plan; give one of them")
        return replace(self, **mine), {name: value for name, value in words.items() if name not in shared}

    def degrees(self, world_size: int) -> Degrees:
        """Degrees for a number of ranks. Raises `PlanError` with every violation at once."""
        self.check()
        return resolve_degrees(self.wish(), world_size, global_batch=self.global_batch)

    def check(self) -> None:
        """Raise `PlanError` with every illegal value."""
        problems = [
            Problem(path=flag(name), value=value, rule="must be a whole number of at least 1")
            for name, value in self.given().items()
            if name in _NOT_DEGREES and value < 1
        ]
        try:
            degrees_from(self.wish(), "options")
        except PlanError as error:
            problems += [replace(p, path=flag(p.path)) for p in error.problems]
        if problems:
            raise PlanError("the options cannot be used", problems)

    def narrowing(self) -> tuple[Values, Values]:
        """The fixed and the forbidden values by dimension. The option ``tp=8`` fixes tp = 8."""
        fixed, forbidden = checked_values(self.fix, self.forbid)
        wish = self.wish()
        if self.selective_blocks is not None:
            raise InputError(
                "--selective-blocks: a search chooses the numbers itself; leave it out, or give it to estimate, verify "
                "or parallelize with all degrees"
            )
        runs = wish.pop("accumulate", 1)
        if runs > 1 and wish.get("pp", 1) > 1:
            raise PlanError(
                f"--accumulate {runs} with --pp {wish['pp']}: every run of a pipeline has its own bubble and saves "
                "nothing; give --micro-batches for the whole step instead of --accumulate"
            )
        if self.accumulate is not None:
            wish["micro_batches"] = runs * wish.get("micro_batches", 1)
        given = {_DIMENSIONS.get(name, name): (name, value) for name, value in wish.items()}
        for dimension, (name, _) in given.items():
            if dimension in fixed:
                raise InputError(f"{flag(name)} and --fix {dimension}=... both fix {dimension}; give one of them")
        also, _ = checked_values({dimension: value for dimension, (_, value) in given.items()})
        return {**fixed, **also}, forbidden

    @property
    def is_staged(self) -> bool:
        """Whether every plan that is asked for has pipeline stages."""
        fixed, forbidden = self.narrowing()
        return 1 not in fixed.get("pp", (1,)) or 1 in forbidden.get("pp", ())

    def check_search(self, num_devices: int) -> None:
        """Check everything that a search can check without the model."""
        from autopar.search.driver.study import study_place
        from autopar.search.result.result import OBJECTIVES, ON_FEWER_DEVICES

        fixed, _ = self.narrowing()
        if self.study is not None:
            study_place(self.study, {})
        if self.objective not in OBJECTIVES:
            raise InputError(f"unknown objective {self.objective!r}; {did_you_mean(str(self.objective), OBJECTIVES)}")
        batch = "global_batch" if self.local_batch is None else "local_batch"
        least = {batch: 1, "top": 0, "trials": 0, "seed": 0}
        problems = [
            Problem(path=word, value=value, rule=f"must be a whole number of at least {lowest}")
            for word, lowest in least.items()
            if isinstance(value := getattr(self, word), bool) or not isinstance(value, int) or value < lowest
        ]
        if self.local_batch is not None and self.global_batch is not None:
            rule, hint = "contradicts global_batch", "give one of the two"
            problems.append(Problem(path="local_batch", rule=rule, suggestion=hint))
        if self.timeout_s is not None and not 0 <= self.timeout_s < float("inf"):
            rule = "must be a number of seconds, at least 0"
            problems.append(Problem(path="timeout_s", value=self.timeout_s, rule=rule))
        if not isinstance(self.chance, (int, float)) or not LEAST_CHANCE <= self.chance <= MOST_CHANCE:
            rule = f"must be from {LEAST_CHANCE} to {MOST_CHANCE}"
            problems.append(Problem(path="chance", value=self.chance, rule=rule))
        if problems:
            raise InputError("the options of the search cannot be used", problems)
        if self.objective not in ON_FEWER_DEVICES:  # for these some part of the cluster may have as many devices
            _check_divisors(fixed, num_devices)

    def refuse_beside_plan(self) -> None:
        """Refuse options beside a plan file, which decides all of them. Raises `InputError` naming the options."""
        if self.given():
            names = ", ".join(flag(name) for name in self.given())
            raise InputError(f"{names}: the plan file decides this; leave out either these options or the plan file")


def command_options() -> dict[str, Any]:
    """The fields of `PlanOptions` that are options of every command, by name."""
    return {each.name: each for each in fields(PlanOptions) if "help" in each.metadata}


def _check_divisors(fixed: Values, num_devices: int) -> None:
    problems = []
    for word in ("pp", "tp", "cp", "ep", "dp_shard", "dp_replicate"):
        values = fixed.get(word, (1,))
        if all(num_devices % int(value) for value in values):
            near = sorted({divisor for value in values for divisor in nearest_divisors(num_devices, int(value))})
            hint = f"nearest: {' or '.join(map(str, near))}"
            rule = f"must divide the {num_devices} devices"
            value = values[0] if len(values) == 1 else values
            problems.append(Problem(path=word, value=value, rule=rule, suggestion=hint))
    if problems:
        raise PlanError("the degrees do not fit", problems)


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")
