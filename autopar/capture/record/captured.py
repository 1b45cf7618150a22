"""A captured model, and its program at any batch size; how one is made is in `autopar.capture.any_size`."""

from collections.abc import Callable
from dataclasses import dataclass

from autopar.capture.forms import Sizes
from autopar.capture.record.read import OtherGraph, program_at
from autopar.capture.record.schema import ProgramRecord
from autopar.capture.shared_axes import with_note_on_axes
from autopar.errors import CaptureError
from autopar.ir.program import Program

Again = Callable[[int], Program]


@dataclass(frozen=True, eq=False, kw_only=True)
class Capture:
    """A captured model. `record` gives its program at other sizes; where it is None, `unknown` says why.

    `again` captures the model at another batch size and the sequence length of the first capture.
    """

    record: ProgramRecord | None
    unknown: str | None
    again: Again | None
    sequence: int | None

    def at(self, *, batch: int, sequence: int | None = None) -> Program:
        """The program at a global batch, and a sequence length where it varies (by default that captured).

        It is the one that a capture at these sizes gives. Takes milliseconds, or as long as a capture where these sizes
        need another. Raises `CaptureError` where a capture is needed and the model is not at hand, or the sequence
        length is one at which it was not captured.
        """
        own = sequence is None or sequence == self.sequence
        if self.record is None:
            why = self.unknown or ""
        else:
            sizes = Sizes(batch=batch, sequence=self.record.sizes.sequence if own else sequence)
            try:
                return with_note_on_axes(program_at(self.record, sizes), [block.axes for block in self.record.blocks])
            except OtherGraph as error:
                why = str(error)
        if self.again is None or not own:
            where = f"batch {batch}" + (f" and sequence {sequence}" if sequence is not None else "")
            raise CaptureError(f"the captured program is not known at {where}: {why}; capture the model at these sizes")
        return self.again(batch)
