"""The compiled programs of one model, by mode, inputs, shapes and decisions: captured once, cached, logged.

Parameters keep their placement. A program captured again is labelled with the parameters' types pinned, so only
activations may be split in another way.
"""

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from autopar.errors import PlanError, RuntimeInputError
from autopar.ir.plan import Plan
from autopar.ir.program import Decision, Program
from autopar.ir.storage import Storage
from autopar.runtime.distributed.broadcast import gather_objects
from autopar.runtime.model.compiled import CompiledProgram
from autopar.runtime.model.decision_check import DecisionCheck
from autopar.runtime.model.index_check import IndexCheck
from autopar.runtime.model.inputs import RankBatch, with_sequences

MAX_SHAPES = 16
_logger = logging.getLogger("autopar")
Pieces = Sequence[Mapping[str, torch.Tensor]]
_Key = tuple[bool, tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A batch to run: micro-batches, also padded with other numbers, mode, doubt about indices, and known decisions."""

    batch: RankBatch
    pieces: Pieces
    padded: Callable[[Mapping[str, int]], Pieces]
    training: bool
    is_unsure: bool
    decided: Mapping[tuple[str, int], Decision] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of this rank's micro-batch by input name."""
        return {name: tuple(tensor.shape) for name, tensor in self.pieces[0].items()}

    def whole(self, ranks: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        """The first global micro-batch. Collective."""
        every = gather_objects({name: part.detach().cpu().clone() for name, part in self.pieces[0].items()}, ranks)
        dims = {info.name: info.batch_dim for info in self.batch.form.inputs}
        joined = {name: torch.cat([r[name] for r in every], dim) for name, dim in dims.items() if dim is not None}
        return every[0] | joined


# Captures and labels the model again, of the plan's program and the storage of each parameter. Collective.
Replan = Callable[[Wanted, CompiledProgram, Mapping[str, Storage]], tuple[Program, Plan]]


class ShapeCache:
    """The compiled programs of one model; `base` is that of the plan."""

    def __init__(self, base: CompiledProgram, replan: Replan | None) -> None:
        self.base, self.replan = base, replan
        sizes = {i.name: with_sequences(i, i.shape, base.micro_batch) for i in base.program.inputs}
        key = _key(base.program, sizes, training=True)
        self._kept: list[tuple[_Key, CompiledProgram]] = [(key, base)]  # least recently used first
        self._warned = False

    @property
    def can_capture(self) -> bool:
        """Whether shapes and modes other than the plan's can be run."""
        return self.replan is not None

    def compiled_for(self, wanted: Wanted, exchange: Callable[[Sequence[int]], list[list[int]]]) -> CompiledProgram:
        """What runs the micro-batches: the program that decides as they do, else a new capture. Collective."""
        key = _key(wanted.batch.form, wanted.sizes, wanted.training)
        known, why, is_new = self._known(key), "", False
        compiled, untried = (known[0], known[1:]) if known else (None, [])
        while True:
            if compiled is None:
                compiled, known, is_new = self._captured(wanted, why), [], True
            if wanted.is_unsure or is_new:
                _indices(compiled).check(wanted.padded(_indices(compiled).legal), compiled.constants(), exchange)
            if not compiled.program.decisions:
                break
            numbers = _decisions(compiled).values(wanted.pieces, compiled.constants())
            choice = next((k for k, c in enumerate([compiled, *untried]) if _decisions(c).fit(numbers)), -1)
            is_mixed = choice < 0 and any(n != numbers[0] for n in numbers)
            rows = exchange([-2 if is_mixed else choice, *_decisions(compiled).difference(numbers)])
            choices = {row[0] for row in rows}
            if choices == {0}:
                break
            why = _decisions(compiled).text([row[1:] for row in rows])
            decided = {} if is_mixed or len(wanted.pieces) == 1 else _decisions(compiled).decided(numbers[0])
            if (is_new and len(decided) <= len(wanted.decided)) or -2 in choices or self.replan is None:
                raise RuntimeInputError(
                    f"the batch takes another branch than the captured model: {why}; {self._remedy(wanted)}"
                )
            compiled = untried.pop(choice - 1) if len(choices) == 1 and choice > 0 else None
            wanted = replace(wanted, decided=decided)
        self._keep(key, compiled)
        return compiled

    def _remedy(self, wanted: Wanted) -> str:
        if len(wanted.pieces) > 1:
            return (
                "pass batches that decide alike, or use micro_batches × accumulate = 1: all micro-batches decide alike"
            )
        if self.replan is None:
            return "pass batches that decide alike, or make the model with autopar.parallelize, which captures again"
        return "a capture of this batch decides otherwise, so rounding decides; leave this batch out"

    def _keep(self, key: _Key, compiled: CompiledProgram) -> None:
        """Count the program as the one used last."""
        self._kept = [*((k, c) for k, c in self._kept if c is not compiled), (key, compiled)]
        if len(self._kept) > MAX_SHAPES + 1:
            self._kept.remove(next(pair for pair in self._kept if pair[1] is not self.base))
            self._warn()

    def is_unsure(self, batch: RankBatch, micro_batches: int, training: bool) -> bool:
        """Whether an index of this rank's batch could be outside of its table, in the program that it will run in."""
        if batch.problems:
            return False
        count = batch.sequences // micro_batches
        infos = batch.form.inputs
        sizes = {info.name: with_sequences(info, batch.tensors[info.name].shape, count) for info in infos}
        known = self._known(_key(batch.form, sizes, training))
        is_as_planned = batch.sequences == self.base.micro_batch * micro_batches
        is_sure = known and not any(_indices(c).is_unsure(batch.tensors, c.constants()) for c in known)
        return not is_as_planned or not is_sure

    def _known(self, key: _Key) -> list[CompiledProgram]:
        """The programs of a key, the one used last first."""
        return [compiled for k, compiled in reversed(self._kept) if k == key]

    def _captured(self, wanted: Wanted, why: str) -> CompiledProgram:
        if self.replan is None:
            what = "eval mode" if not wanted.training else f"shapes {wanted.sizes}"
            raise RuntimeInputError(
                f"this ParallelModel was made from a captured program, which was not captured for {what}; make it with "
                "autopar.parallelize instead, which captures again"
            )
        started, base = time.perf_counter(), self.base
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in: modules look at it
            program, plan = self.replan(wanted, base, base.placements)
        if {(i.name, i.batch_dim) for i in program.inputs} != {(i.name, i.batch_dim) for i in wanted.batch.form.inputs}:
            raise PlanError(
                f"at shapes {wanted.sizes} another dimension is as large as the batch; pass another number of sequences"
            )
        compiled = replace(base, program=program, plan=plan, stored=base.placements)
        if not (dist.is_initialized() and dist.get_rank()):
            shapes = ", ".join(f"{name} {shape}" for name, shape in wanted.sizes.items())
            mode, seconds = "training" if wanted.training else "eval", time.perf_counter() - started
            text = f"captured the model in {mode} mode for micro-batches of {shapes}"
            _logger.info("%s in %.1f s%s", text, seconds, f", because {why}" if why else "")
        return compiled

    def _warn(self) -> None:
        if not self._warned and not (dist.is_initialized() and dist.get_rank()):
            warnings.warn(
                f"the model was captured for more than {MAX_SHAPES} shapes or decisions besides the plan's, so the "
                "oldest capture is dropped; pad batches to a few lengths (powers of two, or multiples of 128)",
                stacklevel=2,
            )
        self._warned = True


def _indices(compiled: CompiledProgram) -> IndexCheck:
    return compiled.once(("indices",), lambda: IndexCheck(compiled))


def _decisions(compiled: CompiledProgram) -> DecisionCheck:
    return compiled.once(("decisions",), lambda: DecisionCheck(compiled))


def _key(form: Program, sizes: Mapping[str, tuple[int, ...]], training: bool) -> _Key:
    return training, tuple(sorted(((i.name, i.dtype, sizes[i.name]) for i in form.inputs), key=lambda i: i[0]))
