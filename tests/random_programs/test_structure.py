"""Random programs by structure equal one device, and their stages are planned; no program ends in an internal error.

Skip connections cross layers, layers share modules, operators have several outputs, and `forward` makes constants.
"""

import logging
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from program_check import LOGGER
from program_source import Source
from random_meshes import check_program, ill_conditioned, unmodified
from structure_draws import draw_structure
from suites import long

from autopar.capture.program import capture_program
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.planning.fixed import label_plan

PLANNED = 4  # every so many programs are also planned with stages


def drawn() -> Iterator[tuple[int, Source]]:
    """Programs that run on one device and that rounding alone does not move."""
    seed = 0
    while True:
        source = draw_structure(random.Random(seed))
        try:
            unmodified(source)
        except RuntimeError:  # shapes that do not fit, or a loss without parameters
            pass
        else:
            if not ill_conditioned(source):
                yield seed, source
        seed += 1


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_programs", (4, long(500)))
def test_equal_to_one_device(num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(LOGGER), "disabled", True)
    labellings, plans = Counter[str](), 0
    programs = drawn()
    for number in range(num_programs):
        seed, source = next(programs)
        checked = check_program(source, random.Random(seed))
        labellings.update(equal=checked.equal, refused=checked.refused)
        plans += number % PLANNED == 0 and has_a_plan(source)
    assert labellings["equal"] > 1.5 * num_programs, labellings
    assert plans > num_programs / PLANNED / 2, plans


def has_a_plan(source: Source) -> bool:
    """Whether two stages of two ranks have a plan. It is refused only as a plan, never by another error."""
    program = capture_program(*source.build())
    degrees = Degrees(pp=2, tp=2, micro_batch=source.batch, micro_batches=2, per_micro_batch=True)
    try:
        return bool(label_plan(program, ClusterSpec.preset("8xh100"), degrees, "Model").cuts)
    except (PlanError, InfeasibleError):
        return False
