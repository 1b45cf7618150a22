"""`capture`: a model captured once, and its program at any batch size.

`torch.export` writes sizes into a graph as numbers, and takes many seconds for a deep model. A search needs the program
at many global micro-batches. `capture_program` makes two captures at different sizes to confirm the axes. The same two
captures show which numbers of the folded program depend on sizes, and how (`autopar.capture.forms`). The program
at other sizes is written from these forms and analysed again. The model is captured again if a number has no form, or
if a capture at the other sizes would give another graph.
"""

import contextlib

from autopar.capture.program import NO_SECOND_CAPTURE, Twice, capture_twice, with_same_sequence
from autopar.capture.record.captured import Capture
from autopar.capture.record.read import OtherGraph, program_at, with_one_sequence
from autopar.capture.record.schema import ProgramRecord
from autopar.capture.record.write import Unexplained, record_of
from autopar.capture.request import Request
from autopar.errors import CaptureError
from autopar.ir.program import Program

_FEWEST = 2  # sequences of a capture; one has no batch dimension that differs from a broadcast one


def capture(request: Request, batch: int | None = None) -> Capture:
    """Capture a model for any batch size, at `batch` sequences or at those of its inputs. One is captured as two."""
    size, _ = request.sizes if request.named_inputs else (None, None)
    twice = capture_twice(request, max(_FEWEST, batch or size or _FEWEST))
    record, unknown = _recorded(twice)
    if record is None and twice.small is not None and twice.sizes.sequence is not None:
        with contextlib.suppress(CaptureError):  # forms in the batch alone may succeed
            record, _ = _recorded(with_same_sequence(twice, request))
    known = {twice.sizes.batch: twice.program}

    def again(size: int) -> Program:
        if size not in known:
            known[size] = capture_twice(request, size).program
        return known[size]

    return Capture(record=record, unknown=unknown, again=again, sequence=twice.program.sequence)


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
