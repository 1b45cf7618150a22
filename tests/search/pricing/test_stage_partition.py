"""Cuts into pipeline stages: the best partition, cuts by hand, cuts that keep parameters where they are."""

import random
from itertools import combinations, pairwise

import pytest
from label_cases import program_of

from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.stages import main_calls, stages_by_parameter, stages_of
from autopar.planning.fixed import label_plan
from autopar.search.pricing.stage_partition import cuts_at, cuts_like, partition


def sums(weights: list[float], cuts: tuple[int, ...]) -> list[float]:
    return [sum(weights[a:b]) for a, b in pairwise((0, *cuts, len(weights)))]


@pytest.mark.parametrize("seed", range(60))
def test_the_best_partition(seed: int) -> None:
    """Against all partitions: the largest sum is least, and the others as even as that allows."""
    draw = random.Random(seed)
    weights = [float(draw.choice((0, 1, 1, 2, 3, 9))) for _ in range(draw.randint(2, 9))]
    anchors = [draw.random() < 0.8 for _ in weights]
    parts = draw.randint(1, len(weights))
    legal = [
        (max(found), sum(s * s for s in found))
        for cuts in combinations(range(1, len(weights)), parts - 1)
        if all(any(anchors[a:b]) for a, b in pairwise((0, *cuts, len(weights))))
        for found in [sums(weights, cuts)]
    ]
    if not legal:
        with pytest.raises(PlanError, match="cannot be cut"):
            partition(weights, parts, can_be_alone=anchors)
        return
    cuts = partition(weights, parts, can_be_alone=anchors)
    assert all(any(anchors[a:b]) for a, b in pairwise((0, *cuts, len(weights))))
    found = sums(weights, cuts)
    assert max(found) == pytest.approx(min(legal)[0])
    assert len(found) == parts


def test_large_vocabularies_make_uneven_stages() -> None:
    """A projection as heavy as three layers: the last of four stages has one layer, as its work is that of four."""
    weights = [0.1, *[1.0] * 12, 3.0]
    assert sums(weights, partition(weights, 4)) == pytest.approx([3.1, 4.0, 4.0, 4.0])


def planned(degrees: Degrees) -> Plan:
    cluster = ClusterSpec.preset(f"{degrees.world_size}xcpu")
    return label_plan(program_of("gpt2", layers=4), cluster, degrees, "gpt2")


def test_cuts_by_hand_and_what_is_wrong_with_them() -> None:
    program = program_of("gpt2", layers=4)
    paths = [program.calls[i].path for i in main_calls(program)]
    found = planned(Degrees(pp=2, micro_batches=4, cut_at=("transformer.h.3",)))
    assert found.cuts == (paths.index("transformer.h.3"),)
    assert Plan.from_dict(found.to_dict()) == found
    with pytest.raises(PlanError, match=r"did you mean 'transformer\.h\.3'"):
        cuts_at(program, ("transformer.h.33",))
    with pytest.raises(PlanError, match="must rise"):
        cuts_at(program, ("transformer.h.3", "transformer.h.1"))


def test_too_many_stages() -> None:
    with pytest.raises(PlanError, match=r"40 pipeline stages .* use fewer"):
        planned(Degrees(pp=20, schedule="interleaved-1f1b", virtual_stages=2, micro_batches=20))


def test_cuts_that_keep_parameters() -> None:
    """The same program cut again by where its parameters are gives the same stages; another order is refused."""
    program = program_of("gpt2", layers=4)
    plan = planned(Degrees(pp=2, schedule="interleaved-1f1b", virtual_stages=2, micro_batches=4))
    stages = stages_of(program, plan.cuts, plan.recomputed)
    placed = stages_by_parameter(program, stages)
    again = stages_of(program, cuts_like(program, placed, 4), plan.recomputed)
    assert [s.parameters for s in again] == [s.parameters for s in stages]
    swapped = {name: tuple(3 - s for s in held) for name, held in placed.items()}
    with pytest.raises(PlanError, match=r"which stage . holds"):
        cuts_like(program, swapped, 4)
