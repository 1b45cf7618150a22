"""A checkpoint of any plan loads under any other, bit for bit, and training goes on as it did."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_ranks import GLOBAL_BATCH, differing, largest_difference
from integration_models import Wanted, built, planned
from suites import thinned

from autopar.ir.plan import Plan
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.verify.random_batches import random_batches

Worlds = Callable[[int], Ranks]
# ranks and plan; "padded" has uneven shards, and projections that are stored in parts
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"dp": 1}),
    "tp 2": (2, {"tp": 2}),
    "zero 3 on 2": (2, {"dp": 2, "zero": 3}),
    "pp 2": (2, {"pp": 2, "micro_batches": 2}),
    "tp 3": (3, {"tp": 3}),
    "tp × zero 3": (4, {"tp": 2, "dp": 2, "zero": 3}),
    "zero 1 on 4": (4, {"dp": 4, "zero": 1}),
    "replicas": (4, {"dp_shard": 2, "dp_replicate": 2, "zero": 3}),
    "pp × zero 2": (4, {"pp": 2, "dp": 2, "zero": 2, "micro_batches": 2}),
    "pp in a v": (4, {"pp": 2, "tp": 2, "schedule": "zbv-zero-bubble", "micro_batches": 4}),
    "cp × zero 3": (4, {"cp": 2, "dp": 2, "zero": 3}),
    "ep × zero 3": (4, {"dp": 4, "ep": 2, "zero": 3}),
    "ep × tp": (4, {"dp": 2, "ep": 2, "tp": 2, "zero": 1}),
    "three dimensions": (8, {"pp": 2, "tp": 2, "dp": 2, "zero": 1, "micro_batches": 2}),
    "pp in dp": (4, {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 2, "order": "dp-pp-tp"}),
    "four stages": (4, {"pp": 4, "micro_batches": 2}),
}
MODELS = {
    "gpt2": {"spec": "gpt2", "layers": 4},  # tied, packed
    "padded": {"spec": "integration_models:padded", "as_it_is": True},
    "mixtral": {"spec": "mixtral-8x7b", "layers": 2},
}
_DENSE = [name for name, (_, wish) in PLANS.items() if "ep" not in wish]
_PAIRS = [(a, _DENSE[(i + step) % len(_DENSE)]) for i, a in enumerate(_DENSE) for step in (0, 1, 5)]


def wanted(model: str, plan: str) -> tuple[int, Wanted, Plan]:
    world_size, wish = PLANS[plan]
    dp = wish.get("dp", wish.get("dp_shard", 1) * wish.get("dp_replicate", 1))
    made = Wanted(float64=True, batch=GLOBAL_BATCH // dp, **MODELS[model])
    return world_size, made, planned(made, world_size, wish)[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, worlds: Worlds) -> Callable[[str, str], dict[str, Any]]:
    """Two steps under a plan, a save, and two more steps."""
    made: dict[tuple[str, str], dict[str, Any]] = {}

    def of(model: str, name: str) -> dict[str, Any]:
        if (model, name) not in made:
            world_size, own, plan = wanted(model, name)
            data = random_batches(built(own, plan.degrees)[0], plan.degrees, 4, 0)
            folder = tmp_path_factory.mktemp("saved")
            results = worlds(world_size).run(
                "checkpoint_ranks:save_and_train", own, plan, data[:2], data[2:], str(folder)
            )
            losses, state, end = results[0]
            made[model, name] = {"folder": folder, "data": data, "losses": losses, "state": state, "end": end}
        return made[model, name]

    return of


def check_pair(model: str, saving: str, loading: str, saved: Any, worlds: Worlds) -> None:
    first = saved(model, saving)
    world_size, own, plan = wanted(model, loading)
    results = worlds(world_size).run(
        "checkpoint_ranks:load_and_train", own, plan, first["data"][2:], str(first["folder"])
    )
    losses, loaded, end = results[0]
    assert not differing(loaded, first["state"])
    if saving == loading:
        assert losses == first["losses"] and not differing(end, first["end"])
    else:
        assert losses == pytest.approx(first["losses"], rel=1e-9)
        assert largest_difference(end, first["end"]) <= 1e-9


@pytest.mark.parametrize(
    ("saving", "loading"),
    thinned(_PAIRS, keep=[("pp in a v", "one rank")]),
)
def test_gpt2(saving: str, loading: str, saved: Any, worlds: Worlds) -> None:
    check_pair("gpt2", saving, loading, saved, worlds)


@pytest.mark.parametrize(
    ("saving", "loading"),
    thinned(
        [
            ("tp × zero 3", "pp × zero 2"),
            ("tp 3", "tp × zero 3"),
            ("pp × zero 2", "tp 3"),
            ("one rank", "zero 1 on 4"),
            ("zero 1 on 4", "tp 2"),
            ("replicas", "one rank"),
            ("tp 3", "tp 3"),
        ],
        keep=[("tp × zero 3", "pp × zero 2")],
    ),
)
def test_parameters_in_parts_and_uneven_shards(saving: str, loading: str, saved: Any, worlds: Worlds) -> None:
    check_pair("padded", saving, loading, saved, worlds)


@pytest.mark.parametrize(
    ("world_size", "wish"),
    thinned(
        [
            (4, {"tp": 2, "dp": 2, "zero": 3}),
            (4, {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 2}),
            (2, {"tp": 2}),
            (1, {"dp": 1}),
        ],
        keep=[(4, {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 2})],
    ),
)
def test_dropout_goes_on_bitwise(world_size: int, wish: dict[str, Any], worlds: Worlds, tmp_path: Path) -> None:
    """Saved asynchronously between two steps, and loaded into a model with another seed; frozen, unused and tied
    parameters included."""
    unbroken, end = worlds(world_size).run("checkpoint_ranks:with_dropout", world_size, wish, str(tmp_path), False)[0]
    losses, found = worlds(world_size).run("checkpoint_ranks:with_dropout", world_size, wish, str(tmp_path), True)[0]
    assert losses == unbroken[2:]
    assert not differing(found, end)


@pytest.mark.long
def test_optimizers_of_torch(four_ranks: Ranks, tmp_path: Path) -> None:
    """State of every shape: scalars, rows and columns of Adafactor, numbers that are no tensors."""
    saving, loading = {"tp": 2, "dp": 2, "zero": 3}, {"dp": 4, "zero": 1}
    results = four_ranks.run("checkpoint_ranks:optimizers_go_on", 4, saving, loading, str(tmp_path))
    assert all(not names for found in results for names in found.values()), results[0]


def test_memory_that_changes_between_saves(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run("checkpoint_ranks:memory_that_changes", str(tmp_path)) == [[True] * 4] * 2


@pytest.mark.parametrize(
    ("saving", "loading"),
    thinned(
        [
            ("ep × zero 3", "ep × zero 3"),
            ("ep × zero 3", "tp × zero 3"),
            ("one rank", "ep × zero 3"),
            ("ep × tp", "ep × zero 3"),
            ("pp × zero 2", "ep × tp"),
        ],
        keep=[("one rank", "ep × zero 3")],
    ),
)
def test_experts(saving: str, loading: str, saved: Any, worlds: Worlds) -> None:
    check_pair("mixtral", saving, loading, saved, worlds)
