"""`PlanOptions`: what a user may ask of a plan, declared once for every command. This module does not import torch."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from autopar.errors import InputError, PlanError, Problem
from autopar.ir.plan import Degrees, degrees_from
from autopar.ir.rank_order import ORDERS
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULE_NAMES
from autopar.planning.degrees import resolve_degrees

_NOT_DEGREES = ("global_batch", "seq_len")
TOP = 5  # plans that a search explains beside the best
TRIALS = 80  # of Optuna, where a pipeline is among the best: enough for all variations of most searches


def _option(help_text: str) -> Any:
    return field(default=None, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Wishes; None is left to autopar. Field names are option names (``dp_replicate`` is ``--dp-replicate``)."""

    pp: int | None = _option("Pipeline-parallel degree: ranks over which the layers are cut. (default: 1)")
    tp: int | None = _option("Tensor-parallel degree. (default: 1)")
    dp: int | None = _option("Data-parallel degree over which state is sharded. (default: what tp leaves)")
    dp_replicate: int | None = _option("Replicas of the sharded data-parallel group (hybrid sharding). (default: 1)")
    zero: int | None = _option("ZeRO stage, 0 to 3: what data-parallel ranks shard. (default: 3)")
    sequence_parallel: bool | None = _option("Require or forbid sequence parallelism on tp. (default: where it pays)")
    micro_batch: int | None = _option("Sequences of one data-parallel rank in one micro-batch.")
    accumulate: int | None = _option("Micro-batches of one step. (default: 1)")
    per_micro_batch: bool | None = _option(
        "Every micro-batch its own loss and batch statistics, averaged over a step: what a plain training loop does. "
        "Lets models accumulate whose samples depend on each other (batch norm, contrastive loss, MoE balance loss); "
        "the loss is then not that of the whole batch. (default: off)"
    )
    schedule: str | None = _option(
        f"Order of micro-batches in a pipeline: {', '.join(SCHEDULE_NAMES)}. (default: {DEFAULT_SCHEDULE})"
    )
    virtual_stages: int | None = _option("Stages of one pipeline rank. (default: the fewest that the schedule has)")
    micro_batches: int | None = _option("Micro-batches of one run of the pipeline. (default: twice the stages)")
    cut_at: str | None = _option(
        "Module paths at which pipeline stages after the first begin, with commas. (default: stages of equal work)"
    )
    order: str | None = _option(
        f"Order of mesh dimensions over ranks, from those farthest apart to neighbours: {', '.join(ORDERS)}. "
        f"(default: {ORDERS[0]})"
    )
    recompute: str | None = _option(
        "What backward computes again instead of keeping: none, or full: everything inside blocks. (default: none)"
    )
    recompute_blocks: str | None = _option(
        "Recompute in the first k repeated blocks of a stage only: one number for all stages, or one for each with "
        "commas. (default: all)"
    )
    global_batch: int | None = _option(
        "Sequences of one step: dp × micro-batch × micro-batches × accumulate; give all but one."
    )
    seq_len: int | None = _option("Tokens of one sequence. (default: the model's context, at most 4096)")

    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if value is not None}

    def wish(self) -> dict[str, Any]:
        """The given options that are degrees, as `autopar.parallelize(plan=...)` takes them."""
        return {name: value for name, value in self.given().items() if name not in _NOT_DEGREES}

    def degrees(self, world_size: int) -> Degrees:
        """Degrees for a number of ranks. Raises `PlanError` with every violation at once."""
        self.check()
        return resolve_degrees(self.wish(), world_size, global_batch=self.global_batch)

    def check(self) -> None:
        """Raises `PlanError` with every value that is none."""
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

    def refuse_beside_plan(self) -> None:
        """A plan file has decided all of this already. Raises `InputError` naming the options."""
        if self.given():
            names = ", ".join(flag(name) for name in self.given())
            raise InputError(f"{names}: --plan has decided this already; leave out either the options or --plan")


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")
