"""The degrees of a plan: mesh, ZeRO stage, micro-batches, pipeline, recomputation."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from math import prod
from typing import Any

from autopar.errors import PlanError, Problem, did_you_mean
from autopar.ir.offload import NO_OFFLOAD, OFFLOADS, OPTIMIZER, PARAMETERS, parts_of_offload
from autopar.ir.optimizers import DEFAULT_OPTIMIZER
from autopar.ir.precision import PRECISIONS, REDUCE_DTYPES
from autopar.ir.rank_order import ORDERS, strides
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULE_NAMES, SCHEDULES, rank_of_stage
from autopar.ir.sharding import Mesh

MAX_DEGREE = 1_000_000
_OF_STAGES = ("recompute_blocks", "selective_blocks")  # one number for all stages, or one for each


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of the mesh, and the other decisions that hold for a whole plan. None leaves a decision to autopar."""

    # ranks: each degree is the number of ranks along a mesh dimension
    pp: int = 1  # pipeline ranks
    tp: int = 1  # ranks that split operators
    tp_dims: tuple[int, ...] | None = None  # tp as two mesh dimensions: key heads, and queries of one key head
    cp: int = 1  # ranks that share samples and split their sequence
    cp_dims: tuple[int, ...] | None = None  # cp as two mesh dimensions: queries, and heads
    context: str | None = None  # what attention splits over cp: "heads", "queries", or keys that travel in a "ring"
    dp_shard: int = 1  # ranks that split samples, and the state as `zero` says
    ep: int = 1  # of the dp_shard ranks, the ranks that also split experts
    dispatch: str | None = None  # rows travel to experts ("exchange"), tokens do ("gather"), experts stay "whole"
    dp_replicate: int = 1  # ranks that split samples and repeat the state
    zero: int = 3  # the ZeRO stage over dp_shard × cp ranks
    sequence_parallel: bool | None = None  # whether tp ranks split the sequence between blocks

    # a step and its pipeline
    micro_batch: int | None = None  # sequences of one data-parallel rank and one micro-batch
    accumulate: int = 1  # runs of the pipeline in a step
    per_micro_batch: bool = False  # whether a step's loss is the mean of the losses of its micro-batches
    schedule: str = DEFAULT_SCHEDULE  # the order of passes (`autopar.ir.schedules`)
    virtual_stages: int = 1  # stages of one pipeline rank
    micro_batches: int = 1  # in one run of the pipeline

    # recomputation of repeated blocks for the backward pass
    # "full": all values inside a block; "selective": the values of the operators in `BlockLabels.recomputed`;
    # "auto": some blocks of each kind, and without both numbers the least that fits
    recompute: str = "none"
    recompute_blocks: int | tuple[int, ...] | None = None  # the first blocks of a stage, or of each stage; None: all
    selective_blocks: int | tuple[int, ...] | None = None  # the blocks after them that "auto" recomputes selectively

    # everything else
    cut_at: tuple[str, ...] | None = None  # module paths where the stages after the first begin, given by the user
    order: str = ORDERS[0]  # of mesh dimensions over ranks (`autopar.ir.rank_order`)
    loss_chunks: int = 1  # of tokens, in which the head and the loss run (`autopar.lowering.loss_chunks`)
    offload: str = NO_OFFLOAD  # what is in host memory (`autopar.ir.offload`)
    optimizer: str = DEFAULT_OPTIMIZER  # whose state the memory counts (`autopar.ir.optimizers`)
    precision: str | None = None  # of computing, beside float32 master weights; None: the model's own
    reduce_dtype: str | None = None  # of sums of gradients; None: the dtype of the gradients

    @property
    def dp(self) -> int:
        """Ranks over which the batch is split."""
        return self.dp_shard * self.dp_replicate

    @property
    def shard_ranks(self) -> int:
        """Ranks that ZeRO divides the state over. The ranks of `cp` hold the same parameters, as those of `dp` do."""
        return self.dp_shard * self.cp

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same parameters, or shards of them."""
        return self.dp_replicate * self.shard_ranks

    @property
    def world_size(self) -> int:
        return self.pp * self.data_ranks * self.tp

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step, over all runs of the schedule."""
        return self.micro_batches * self.accumulate

    @property
    def local_batch(self) -> int:
        """Sequences of one data-parallel rank in one step; a micro-batch that is left open has one."""
        return (self.micro_batch or 1) * self.num_micro_batches

    @property
    def global_batch(self) -> int:
        """Sequences of one step on all ranks; a micro-batch that is left open has one."""
        return self.dp * self.local_batch

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual_stages

    def full_blocks_of(self, stage: int) -> int | None:
        """How many of the first repeated blocks of a stage are recomputed fully; None for all."""
        if self.recompute in ("none", "selective") or self.is_recompute_open:
            return 0
        return _of_stage(self.recompute_blocks, stage)

    def selective_blocks_of(self, stage: int) -> int | None:
        """How many of the blocks after the fully recomputed ones are recomputed selectively; None for all."""
        if self.recompute in ("none", "full") or self.is_recompute_open:
            return 0
        return _of_stage(self.recompute_blocks if self.recompute == "selective" else self.selective_blocks, stage)

    @property
    def is_recompute_open(self) -> bool:
        """Whether the least recomputation that fits is still to be found."""
        return self.recompute == "auto" and self.recompute_blocks is None and self.selective_blocks is None

    def offloads(self, part: str) -> bool:
        """Whether a part is on the host: one of `OPTIMIZER`, `PARAMETERS` and `ACTIVATIONS` (`autopar.ir.offload`)."""
        return part in parts_of_offload(self.offload)

    @property
    def fsdp_stage(self) -> int:
        """The ZeRO stage that FSDP2 runs, 0 if none. Parameters that one rank holds it holds only on the host."""
        if self.data_ranks > 1:
            return self.zero
        return 3 if self.offloads(PARAMETERS) else 0

    @property
    def expert_shard_ranks(self) -> int:
        """Ranks that ZeRO divides the state of experts over, if `ep` splits them."""
        return self.shard_ranks // self.ep

    @property
    def fsdp_stage_of_experts(self) -> int:
        """`fsdp_stage` for experts that `ep` splits. A single rank may hold a part of the experts."""
        if self.dp_replicate * self.expert_shard_ranks > 1:
            return self.zero
        return 3 if self.offloads(PARAMETERS) else 0

    @property
    def splits_backward(self) -> bool:
        """Whether the pipeline runs backward passes in two parts, one for inputs and one for weights."""
        return self.pp > 1 and SCHEDULES[self.schedule].splits_backward

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return rank_of_stage(self.schedule, self.pp, stage)

    @property
    def strides(self) -> dict[str, int]:
        """How many ranks lie from one rank of pp, dp, cp and tp to the next."""
        return strides(self.order, self._sizes)

    @property
    def _sizes(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    def coordinate(self, name: str, rank: int) -> int:
        """Where a rank is on pp, dp, cp or tp."""
        return rank // self.strides[name] % self._sizes[name]

    @property
    def mesh(self) -> Mesh:
        """The mesh of labels: `dp` splits the batch, `cp` the sequence, `tp` everything else.

        `cp` and `tp` may be two mesh dimensions each: `cp0` and `cp1`, `tp0` and `tp1`.

        With expert parallelism `dp` is what `ep` leaves of the data-parallel ranks. Without it there is no `ep`, and
        without context parallelism no `cp`.
        """
        tensor = {"tp": self.tp} if self.tp_dims is None else {f"tp{i}": n for i, n in enumerate(self.tp_dims)}
        experts = {"ep": self.ep} if self.ep > 1 else {}
        context = {"cp": self.cp} if self.cp_dims is None else {f"cp{i}": n for i, n in enumerate(self.cp_dims)}
        context = context if self.cp > 1 else {}
        return Mesh.of(dp=self.dp // self.ep, **experts, **context, **tensor)


RECOMPUTE = ("none", "selective", "full", "auto")
HEADS, QUERIES, RING = CONTEXTS = ("heads", "queries", "ring")
EXCHANGE, GATHER, WHOLE = DISPATCHES = ("exchange", "gather", "whole")


def _of_stage(blocks: int | tuple[int, ...] | None, stage: int) -> int | None:
    return blocks[stage] if isinstance(blocks, tuple) else blocks


_ALIASES = {"dp": "dp_shard"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "dispatch": DISPATCHES,
    "context": CONTEXTS,
    "schedule": SCHEDULE_NAMES,
    "recompute": RECOMPUTE,
    "order": ORDERS,
    "offload": OFFLOADS,
    "precision": PRECISIONS,
    "reduce_dtype": REDUCE_DTYPES,
}
_MAY_BE_OPEN = ("micro_batch", "dispatch", "context", *_OF_STAGES, "precision", "reduce_dtype")


def degrees_from(data: Any, source: str = "plan") -> Degrees:
    """Degrees of a mapping such as ``{"tp": 2, "dp": 2, "zero": 3}``; `dp` means `dp_shard`."""
    if not isinstance(data, Mapping):
        raise PlanError(f"{source}: expected a mapping such as {{'tp': 2, 'dp': 2}}, got {type(data).__name__}")
    fields = {field.name for field in dataclass_fields(Degrees)}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in data.items():
        name: Any = _ALIASES.get(key, key)
        rule = ""
        if name not in fields:
            rule = f"unknown key; {did_you_mean(str(key), sorted(fields | set(_ALIASES)))}"
            problems.append(Problem(path=str(key), rule=rule))
            continue
        if name in values:
            problems.append(Problem(path=str(key), rule=f"says {name} a second time", suggestion="keep one"))
            continue
        values[name] = value
        if name in ("tp_dims", "cp_dims"):
            values[name], rule = _two_dims(value, name[:2], data.get(name[:2]))
        elif name == "sequence_parallel":
            rule = "" if value is None or isinstance(value, bool) else "must be true, false or null"
        elif name == "per_micro_batch":
            rule = "" if isinstance(value, bool) else "must be true or false"
        elif name == "cut_at":
            values[name], rule = _paths(value)
        elif name == "optimizer":
            rule = "" if isinstance(value, str) and value else "must be a name such as adamw"
        elif value is None and name in _MAY_BE_OPEN:
            continue
        elif name in _CHOICES:
            rule = "" if value in _CHOICES[name] else f"must be one of {', '.join(_CHOICES[name])}"
        elif name in _OF_STAGES and not isinstance(value, int):
            values[name], rule = _blocks_of_stages(value, least=0 if data.get("recompute") == "auto" else 1)
        elif name in _OF_STAGES and data.get("recompute") == "auto":
            rule = "" if _is_count(value) else "must be a whole number of at least 0"
        elif isinstance(value, bool) or not isinstance(value, int):
            rule = "must be a whole number"
        elif name == "zero":
            rule = "" if value in (0, 1, 2, 3) else "must be 0, 1, 2 or 3"
        elif not 1 <= value <= MAX_DEGREE:
            rule = f"must be at least 1 and at most {MAX_DEGREE:,}"
        if rule:
            problems.append(Problem(path=str(key), value="null" if value is None else value, rule=rule))
    if problems:
        raise PlanError(f"{source} cannot be used", problems)
    for name in ("tp", "cp"):
        if values.get(f"{name}_dims") is not None:
            values[name] = prod(values[f"{name}_dims"])
    return Degrees(**values)


def offload_problems(degrees: Degrees) -> list[Problem]:
    """Why the offload of a plan cannot run, with the plan that can."""
    if degrees.offloads(PARAMETERS) and degrees.zero == 0 and degrees.data_ranks > 1:
        offload = degrees.offload
        return [
            Problem(
                path="offload",
                value=offload,
                rule="moves shards of parameters, and zero 0 has no shards",
                suggestion=f"use zero 3, or offload {offload.replace(PARAMETERS, OPTIMIZER)}",
            )
        ]
    return []


def _paths(value: Any) -> tuple[tuple[str, ...] | None, str]:
    """Module paths, also as one text with commas between them."""
    split = [path.strip() for path in value.split(",")] if isinstance(value, str) else value
    if split is None:
        return None, ""
    if not isinstance(split, (list, tuple)) or not split or any(not isinstance(p, str) or not p for p in split):
        return None, "must be module paths such as layers.2,layers.4"
    return tuple(split), ""


def _blocks_of_stages(value: Any, *, least: int) -> tuple[int | tuple[int, ...] | None, str]:
    """One number for every stage, also as one text with commas. A single number holds for all stages."""
    split = [int(n) if n.strip().isdecimal() else n for n in value.split(",")] if isinstance(value, str) else value
    if not isinstance(split, (list, tuple)) or not split or any(not _is_count(n) for n in split):
        return None, "must be a whole number, or one for every stage such as 3,2,1,0"
    if len(split) == 1:
        return split[0], "" if split[0] >= least else "must be at least 1; leave recompute out to recompute nothing"
    return tuple(split), ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DEGREE


def _two_dims(value: Any, name: str, degree: Any) -> tuple[tuple[int, ...] | None, str]:
    """Two degrees of at least 2 whose product is the degree of `name`, and the rule that they break, if any."""
    if value is None:
        return None, ""
    whole = isinstance(value, (list, tuple)) and all(isinstance(d, int) and not isinstance(d, bool) for d in value)
    if not whole or len(value) != 2 or any(not 2 <= d <= MAX_DEGREE for d in value):
        return None, "must be two whole numbers of at least 2"
    if degree is not None and prod(value) != degree:
        return None, f"must have the product {name} = {degree}"
    return tuple(value), ""
