"""Expert parallelism on gloo ranks: equal to one device, priced as it runs, and with the norm of all gradients."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from expert_ranks import norms_of_one_device
from priced_models import MIXTRAL, RANKS, Case, case, planned_case
from step_traffic import StageTraffic, sends_of
from suites import thinned
from test_priced_is_run import TOLERANCE, as_operators, runs_of

from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.dry_run.memory import memory_of
from autopar.runtime.dry_run.rank_view import rank_view

PRICED = (
    case(MIXTRAL, dp=4, ep=2, zero=3, dispatch="exchange"),
    case(MIXTRAL, dp=4, ep=2, zero=3, dispatch="gather"),
    case(MIXTRAL, dp=4, ep=2, zero=1, accumulate=2, dispatch="exchange"),
    case(MIXTRAL, dp=4, ep=4, zero=2, dispatch="exchange"),
    case(MIXTRAL, dp=4, ep=2, zero=0, dispatch="exchange"),
    case(MIXTRAL, dp=2, ep=2, tp=2, zero=3, dispatch="exchange"),
    case(MIXTRAL, dp=2, ep=2, cp=2, zero=3, dispatch="exchange"),
    case(MIXTRAL, dp_shard=2, ep=2, dp_replicate=2, zero=3, dispatch="exchange"),
    case(MIXTRAL, dp=2, ep=2, pp=2, zero=2, micro_batches=2, dispatch="exchange"),
    case(MIXTRAL, dp=4, ep=2, zero=3, recompute="full", dispatch="exchange"),
    case(MIXTRAL, dp=4, ep=2, zero=3, recompute="selective", dispatch="exchange"),
)
ROWS = ("ep", "all_to_all")


@pytest.mark.parametrize("one", thinned(PRICED, keep=PRICED[:1]), ids=lambda one: one.name)
def test_priced_is_run(one: Case, worlds: Callable[[int], Ranks]) -> None:
    """Every call is priced, and all bytes but the bytes of rows: which rank has them depends on the routing.

    All ranks together send and keep as many rows as priced.
    """
    program, plan = planned_case(one)
    known: dict[object, StageTraffic] = {}
    rows, saved = [0, 0], [0, 0]
    for rank, (counts, memory) in enumerate(worlds(RANKS).run("priced_ranks:measured_step", one, plan)):
        setting = rank_view(program, plan, rank)
        runs = runs_of(setting, known)
        priced = as_operators(sends_of(setting, runs))
        if ROWS in priced:
            assert counts[ROWS][0] == priced[ROWS][0], f"rank {rank}"
            rows = [rows[0] + counts.pop(ROWS)[1], rows[1] + priced.pop(ROWS)[1]]
        assert counts == priced, f"rank {rank}"
        held = memory_of(setting, runs)
        predicted = {
            "parameters": held.parameter_bytes,
            "gradients": held.gradient_bytes,
            "optimizer": held.optimizer_bytes,
        }
        saved = [saved[0] + memory.pop("saved"), saved[1] + held.saved_bytes]
        assert memory == {name: pytest.approx(size, rel=TOLERANCE) for name, size in predicted.items()}, f"rank {rank}"
    assert rows[0] == rows[1]
    if plan.degrees.num_micro_batches == 1:  # of several, a rank keeps most in the one with most of its rows
        assert saved[0] == pytest.approx(saved[1], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("wish", "clipping", "foreach"),
    thinned(
        product(
            ({"dp": 4, "ep": 2, "zero": 3}, {"dp": 4, "ep": 4, "zero": 1}, {"dp": 2, "ep": 2, "tp": 2, "zero": 0}),
            ("ours", "torch's"),
            (None, True),
        ),
        keep=[
            ({"dp": 2, "ep": 2, "tp": 2, "zero": 0}, "torch's", None),
        ],
    ),
    ids=str,
)
def test_norm_of_all_gradients(wish: dict[str, Any], clipping: str, foreach: bool | None, four_ranks: Ranks) -> None:
    """Every element counts once, whichever ranks hold it."""
    expected = norms_of_one_device()
    for found in four_ranks.run("expert_ranks:norms", wish, clipping, foreach, RANKS):
        assert found == pytest.approx(expected, rel=1e-4)
