"""`capture`: a model captured once, and its program at any batch size.

`torch.export` writes sizes into a graph as numbers, and takes many seconds for a deep model. A search needs the program
at many global micro-batches. `capture_program` makes two captures at different sizes to confirm the axes. The same two
captures show which numbers of the folded program depend on sizes, and how (`autopar.capture.forms`). The program
at other sizes is written from these forms and analysed again. The model is captured again if a number has no form, or
if a capture at the other sizes would give another graph.
"""

import contextlib

from torch import nn

from autopar.capture.export.data_reads import Reading
from autopar.capture.export.export import Inputs, LossFunction
from autopar.capture.precision import in_precision, inputs_in_precision, products_of
from autopar.capture.program import (
    NO_SECOND_CAPTURE,
    CaptureRequest,
    Twice,
    batch_and_sequence,
    capture_twice,
    with_same_sequence,
)
from autopar.capture.record.captured import Capture
from autopar.capture.record.read import OtherGraph, program_at, with_one_sequence
from autopar.capture.record.schema import ProgramRecord
from autopar.capture.record.write import Unexplained, record_of
from autopar.errors import CaptureError
from autopar.ir.program import Program

FEWEST = 2  # sequences of a capture; one has no batch dimension that differs from a broadcast one


def capture(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    batch: int | None = None,
    loss_fn: LossFunction | None = None,
    training: bool = True,
    specialise: bool = False,
    precision: str | None = None,
    staged: bool = False,
) -> Capture:
    """Capture a model for any batch size, with the arguments and errors of `capture_program`.

    The result keeps the model and its inputs, because some sizes need another capture. `staged` is of `CaptureRequest`.
    """
    asked = CaptureRequest(
        model=in_precision(model, precision),
        inputs=inputs_in_precision(example_inputs, precision),
        loss_fn=loss_fn,
        training=training,
        reading=Reading(specialise=specialise),
        products=products_of(precision),
        staged=staged,
    )
    return captured(asked, batch)


def captured(asked: CaptureRequest, batch: int | None = None) -> Capture:
    """The capture of a request at `batch` sequences, or at the request's own. One sequence is captured as two."""
    own, _ = batch_and_sequence(asked.named_inputs) if asked.named_inputs else (None, None)
    found = capture_twice(asked, max(FEWEST, batch or own or FEWEST))
    record, unknown = _recorded(found)
    if record is None and found.small is not None and found.sizes.sequence is not None:
        with contextlib.suppress(CaptureError):  # forms in the batch alone may succeed
            record, _ = _recorded(with_same_sequence(found, asked))
    known = {found.sizes.batch: found.program}

    def again(size: int) -> Program:
        if size not in known:
            known[size] = capture_twice(asked, size).program
        return known[size]

    return Capture(record=record, unknown=unknown, again=again, sequence=found.program.sequence)


def _recorded(twice: Twice) -> tuple[ProgramRecord | None, str | None]:
    """The record of two captures, or the reason why there is none. The record must reproduce both captures."""
    if twice.small is None:
        return None, NO_SECOND_CAPTURE
    try:
        record = record_of(twice)
        for sizes, program in ((twice.sizes, twice.program), (twice.small_sizes, twice.small)):
            if program_at(record, sizes).fingerprint != program.fingerprint:
                return None, "the record of the capture differs from the capture"
    except (Unexplained, OtherGraph) as error:
        return None, str(error)
    return with_one_sequence(record), None
