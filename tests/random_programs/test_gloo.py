"""Random programs on four gloo ranks equal the unmodified module: loss and every gradient, ZeRO 0 to 3."""

import logging
import random
from collections.abc import Iterator

import pytest
from floored_error import floored_error, rms
from program_draws import KINDS, draw_source
from program_source import Source
from random_meshes import ill_conditioned, unmodified
from random_ranks import LOGGER, Step, captured
from suites import long

from autopar.capture.record.file import to_bytes
from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import label_plan
from autopar.runtime.distributed.launch import Ranks

TOLERANCE = 1e-9
WISHES = (
    {"tp": 4}, {"tp": 2, "dp": 2, "zero": 0}, {"tp": 2, "dp": 2, "zero": 1}, {"tp": 2, "dp": 2, "zero": 2},
    {"tp": 2, "dp": 2, "zero": 3}, {"dp": 4, "zero": 3}, {"dp": 4, "zero": 1},
)  # fmt: skip


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    world = Ranks(4)
    yield world
    world.close()


def planned(number: int) -> tuple[Source, Plan, Program] | None:
    """A module, its plan and its program; None where a degree does not divide, or rounding is all there is."""
    rng = random.Random(1000 + number)
    source = draw_source(KINDS[number % len(KINDS)], rng)
    wish = WISHES[number % len(WISHES)]
    if source.batch % wish.get("dp", 1) or ill_conditioned(source):
        return None
    degrees = resolve_degrees(wish, 4, source.batch // wish.get("dp", 1))
    program = captured(source, degrees)
    try:
        return source, label_plan(program, ClusterSpec.preset("4xcpu"), degrees, "Model"), program
    except PlanError:
        return None


@pytest.mark.parametrize("num_programs", (4, long(20)))
def test_gloo_ranks_equal_the_unmodified_module(
    num_programs: int, four_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(LOGGER), "disabled", True)
    done, number, stages = 0, 0, set()
    while done < num_programs:
        assert number < 4 * num_programs, f"only {done} of {number} programs have a plan"
        found = planned(number)
        number += 1
        if found is None:
            continue
        source, plan, program = found
        step = four_ranks.run("random_ranks:one_step", source, plan, to_bytes(program))[0]
        compare(step, source, f"program {number - 1} {plan.degrees}")
        stages.add(plan.degrees.zero)
        done += 1
    assert stages == {0, 1, 2, 3}


def compare(step: Step, source: Source, what: str) -> None:
    loss, gradients = unmodified(source)
    found_loss, found = step
    assert floored_error(found_loss, loss, 0.0) <= TOLERANCE, f"{what}: loss {found_loss}, expected {loss}\n{source!r}"
    scale = rms(gradients.values())
    assert found.keys() == gradients.keys(), f"{what}\n{source!r}"
    errors = {name: floored_error(found[name], grad, scale) for name, grad in gradients.items()}
    assert max(errors.values()) <= TOLERANCE, f"{what}: {errors}\n{source!r}"
