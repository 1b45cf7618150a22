"""A captured model, and its program at any batch size. `autopar.capture.any_size` makes it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.capture.axes import with_note_on_axes
from autopar.capture.forms import Sizes
from autopar.capture.record.read import OtherGraph, program_at
from autopar.capture.record.schema import ProgramRecord
from autopar.errors import CaptureError
from autopar.ir.program import Program

UNSEEN = "a capture of one sequence does not show whether sequences depend on each other"
Again = Callable[[int], Program]


@dataclass(frozen=True, eq=False, kw_only=True)
class Capture:
    """A captured model. `record` gives its program at other sizes. If `record` is None, `unknown` has the reason."""

    record: ProgramRecord | None
    unknown: str | None
    again: Again | None  # captures the model at another batch size
    sequence: int | None  # the length of the first capture; None if it does not vary

    def at(self, *, batch: int, sequence: int | None = None) -> Program:
        """The program at a global batch and a sequence length, equal to a new capture at these sizes."""
        same = sequence is None or sequence == self.sequence
        if self.record is None:
            why = self.unknown or ""
        else:
            sizes = Sizes(batch=batch, sequence=self.record.sizes.sequence if same else sequence)
            try:
                result = program_at(self.record, sizes)
                return result if batch == 1 else with_note_on_axes(result, [b.axes for b in self.record.blocks])
            except OtherGraph as error:
                why = str(error)
        if self.again is None or not same:
            where = f"batch {batch}" + (f" and sequence {sequence}" if sequence is not None else "")
            raise CaptureError(f"the program is not known at {where}, because {why}; capture the model at these sizes")
        result = self.again(batch)
        return result if batch > 1 else replace(result, mixes_batch=f"{UNSEEN}, because {why}")

    @property
    def has_one_sequence(self) -> bool:
        """Whether the record gives the program at one sequence, so that micro-batches of one are known to be right."""
        return self.record is not None and self.record.not_one_sequence is None
