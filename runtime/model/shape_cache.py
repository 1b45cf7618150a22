"""The compiled program of each batch shape and mode: captured once, cached, logged.

Parameters keep their placement. A program captured for another shape or mode is labelled with the parameters' types
pinned, so only activations may be split in another way.
"""

import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from autopar.errors import PlanError, RuntimeInputError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.storage import Storage, storage_of
from autopar.runtime.model.compiled import CompiledProgram, compile_program
from autopar.runtime.model.inputs import Batch, with_sequences
from autopar.runtime.parameters.relayout import same_layout

MAX_SHAPES = 16
_logger = logging.getLogger("autopar")
InputShapes = Mapping[str, tuple[int, ...]]
_Key = tuple[bool, tuple[tuple[str, tuple[int, ...]], ...]]


class Replan(Protocol):
    """Captures and labels the model again. Collective; raises the same `AutoparError` on all ranks."""

    def __call__(self, sizes: InputShapes, *, training: bool, held: Mapping[str, Storage]) -> tuple[Program, Plan]:
        """`sizes` are the shapes of one rank's micro-batch by input name, `held` how each parameter is stored."""
        ...


class ShapeCache:
    """The compiled programs of one model by (mode, shapes of a rank's micro-batch); `base` is that of the plan."""

    def __init__(
        self,
        base: CompiledProgram,
        held: Mapping[str, Storage],
        replan: Replan | None,
    ) -> None:
        self.base, self._placements, self.replan = base, held, replan
        self._base_key = _key(base.local_shapes(), training=True)
        self._others: dict[_Key, CompiledProgram] = {}  # least recently used first
        self._warned = False

    @property
    def can_capture(self) -> bool:
        """Whether shapes and modes other than the plan's can be run."""
        return self.replan is not None

    def compiled_for(self, sizes: InputShapes, training: bool) -> CompiledProgram:
        """What runs a micro-batch of the given local shapes. Collective where it is new: all ranks ask for the same."""
        key = _key(sizes, training)
        known = self._known(key)
        if known is not None:
            if key in self._others:
                self._others[key] = self._others.pop(key)
            return known
        if self.replan is None:
            what = "eval mode" if not training else f"shapes {dict(sizes)}"
            raise RuntimeInputError(
                f"this ParallelModel was made from a captured program, which was not captured for {what}; make it with "
                "autopar.parallelize instead, which captures again"
            )
        started = time.perf_counter()
        made = self._compile(self.replan, sizes, training)
        self._others[key] = made
        self._announce(sizes, training, time.perf_counter() - started)
        if len(self._others) > MAX_SHAPES:
            del self._others[next(iter(self._others))]
            self._warn()
        return made

    def is_unsure(self, batch: Batch, micro_batches: int, training: bool) -> bool:
        """Whether an index of this rank's batch could be outside of its table (`autopar.runtime.model.index_check`).

        A rank with another number of sequences than planned does not know which program its batch will run in.
        """
        if batch.problems:
            return False
        count = batch.sequences // micro_batches
        infos = self.base.program.inputs
        sizes = {info.name: with_sequences(info, batch.tensors[info.name].shape, count) for info in infos}
        known = self._known(_key(sizes, training))
        is_as_planned = batch.sequences == self.base.micro_batch * micro_batches
        return not is_as_planned or known is None or known.indices.is_unsure(batch.tensors, known.constants())

    def _known(self, key: _Key) -> CompiledProgram | None:
        return self.base if key == self._base_key else self._others.get(key)

    def _compile(self, replan: Replan, sizes: InputShapes, training: bool) -> CompiledProgram:
        base = self.base
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in: modules look at it
            program, plan = replan(sizes, training=training, held=self._placements)
        if [(i.name, i.batch_dim) for i in program.inputs] != [(i.name, i.batch_dim) for i in base.program.inputs]:
            raise PlanError(
                f"at shapes {dict(sizes)} another dimension is as large as the batch; pass another number of sequences"
            )
        made = compile_program(program, plan, base.buffers, base.mesh, base.streams, base.device)
        used = {n: storage_of(made.analysis.outer[n], made.types[n], plan.mesh) for n in program.parameters}
        return replace(made, used={n: how for n, how in used.items() if not same_layout(how, self._placements[n])})

    def _announce(self, sizes: InputShapes, training: bool, seconds: float) -> None:
        if dist.is_initialized() and dist.get_rank():
            return
        shapes = ", ".join(f"{name} {shape}" for name, shape in sizes.items())
        mode = "training" if training else "eval"
        _logger.info("captured the model in %s mode for micro-batches of %s in %.1f s", mode, shapes, seconds)

    def _warn(self) -> None:
        if not self._warned and not (dist.is_initialized() and dist.get_rank()):
            warnings.warn(
                f"the model was captured for more than {MAX_SHAPES} shapes besides the plan's, so the oldest capture "
                "is "
                "dropped; pad batches to a few lengths (powers of two, or multiples of 128)",
                stacklevel=2,
            )
        self._warned = True


def _key(sizes: InputShapes, training: bool) -> _Key:
    return training, tuple(sorted(sizes.items()))
