"""Buffers as a micro-batch reads them, in copies: the backward pass and recomputation need the values before an update.

If samples change a buffer, each micro-batch does. Any other change is one of a step, so its micro-batches read one
value.
"""

import torch

from autopar.ir.program import Program
from autopar.ir.stages import updated_by_inputs


class OldBuffers:
    """The copies of one step. With `per_micro_batch` every micro-batch is a step of its own."""

    def __init__(self, program: Program, *, per_micro_batch: bool) -> None:
        self._changing = frozenset(program.updates) if per_micro_batch else updated_by_inputs(program)
        self._held: dict[str, torch.Tensor] = {}

    def of(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The value of a buffer for a micro-batch. `value` is the present one."""
        if name in self._changing:
            return value.clone()
        if name not in self._held:
            self._held[name] = value.clone()
        return self._held[name]

    def clear(self) -> None:
        """Begin a step."""
        self._held.clear()
