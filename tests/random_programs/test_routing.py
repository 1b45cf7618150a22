"""Random mixtures of experts with random labels equal one device on random meshes of up to 8 ranks."""

import random
from collections import Counter

import pytest
from equivalence import case_of, check, check_random, labelled
from routed_models import GATES, ROUTINGS, Mixture, RoutedModel, balance_loss, batch_of, randomise, z_loss
from suites import long

from autopar.ir.sharding import Mesh
from autopar.rules.routed import ORDER

FEW, MANY = 4, 200
MESHES = (
    Mesh.of(tp=2), Mesh.of(tp=3), Mesh.of(tp=4), Mesh.of(dp=2), Mesh.of(dp=4), Mesh.of(dp=2, tp=2), Mesh.of(dp=3, tp=2),
    Mesh.of(dp=2, tp=4), Mesh.of(tp=2, tq=2),
)  # fmt: skip


def drawn(rng: random.Random) -> tuple[RoutedModel, dict[str, object]]:
    """One to three mixtures, each with a routing and a gate of its own, and a batch of any shape."""
    mixtures = []
    for _ in range(rng.randint(1, 3)):
        experts = rng.choice([4, 6, 8])
        choices = rng.randint(1, experts // 2)
        mixture = Mixture(rng.choice(list(ROUTINGS)), experts, choices, rng.choice(list(GATES)), rng.random() < 0.3)
        mixtures.append(mixture)
    model = randomise(RoutedModel(mixtures, rng.choice([None, None, z_loss, balance_loss])))
    assert isinstance(model, RoutedModel)
    return model, dict(batch_of(rng.choice([2, 3, 4, 6]), rng.choice([3, 4, 5, 6, 8])))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_programs", (FEW, long(MANY)))
def test_equal_to_one_device(num_programs: int) -> None:
    split = Counter[str]()
    for seed in range(num_programs):
        rng = random.Random(seed)
        case = case_of(drawn(rng))
        mesh = rng.choice(MESHES)
        check_random(case, mesh, seed)
        dp = mesh.as_dict().get("dp", 1)
        if seed % 4 == 0 and "tq" not in mesh.names and case.program.batch % dp == 0:
            solved = Mesh.of(dp=dp) if dp > 1 else mesh
            check(case, labelled(case, solved), solved)
        orders = [n for b in case.program.blocks for n in b.graph.nodes if n.target is ORDER]
        split["orders"] += len(orders)
    assert split["orders"] > num_programs / 2, split
