"""`capture`: a model captured once, and its program at any batch size.

`torch.export` bakes sizes into a graph, and takes many seconds for a deep model; a search asks for the program at many
global micro-batches. Two captures at different sizes, which `capture_program` makes anyway to confirm the axes, tell
which numbers of the folded program are sizes, and how (`autopar.capture.forms`). The program at other sizes is
then written from these forms and analysed anew. Where numbers are not explained, or a capture at the other sizes would
give another graph, the model is captured again.
"""

import contextlib

from torch import nn

from autopar.capture.export.export import Inputs, LossFunction
from autopar.capture.program import NO_SECOND_CAPTURE, Twice, capture_program, capture_twice, with_same_sequence
from autopar.capture.record.captured import Capture
from autopar.capture.record.read import OtherGraph, program_at
from autopar.capture.record.schema import ProgramRecord
from autopar.capture.record.write import Unexplained, record_of
from autopar.errors import CaptureError
from autopar.ir.program import Program


def capture(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    batch: int | None = None,
    loss_fn: LossFunction | None = None,
    training: bool = True,
) -> Capture:
    """Capture a model for any batch size; arguments and errors are those of `capture_program`.

    The model and its inputs are kept, to be captured again where that is needed.
    """

    found = capture_twice(model, example_inputs, batch=batch, loss_fn=loss_fn, training=training)
    record, unknown = _recorded(found)
    if record is None and found.small is not None and found.sizes.sequence is not None:
        with contextlib.suppress(CaptureError):  # the batch alone may explain what both do not
            record, _ = _recorded(with_same_sequence(found, model, example_inputs, loss_fn=loss_fn, training=training))
    known = {found.sizes.batch: found.program}

    def again(size: int) -> Program:
        if size not in known:
            known[size] = capture_program(model, example_inputs, batch=size, loss_fn=loss_fn, training=training)
        return known[size]

    return Capture(record=record, unknown=unknown, again=again, sequence=found.program.sequence)


def _recorded(twice: Twice) -> tuple[ProgramRecord | None, str | None]:
    """The record of two captures, if it gives both of them again; else why there is none."""
    if twice.small is None:
        return None, NO_SECOND_CAPTURE
    try:
        record = record_of(twice)
        for sizes, program in ((twice.sizes, twice.program), (twice.small_sizes, twice.small)):
            if program_at(record, sizes).fingerprint != program.fingerprint:
                return None, "what was written down is not what was captured"
    except (Unexplained, OtherGraph) as error:
        return None, str(error)
    return record, None
