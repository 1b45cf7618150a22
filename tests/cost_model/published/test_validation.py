"""The measures on rows whose errors are known by construction, and against NumPy and the plain definitions."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path

import numpy
import pytest
from script import script

from autopar.cost_model.published.ranking import RowTimes, ranked_groups, spearman
from autopar.cost_model.published.row import RESULT_COLUMNS, Estimator, NoEstimate, Row, RowEstimate, read_rows
from autopar.cost_model.published.validation import compared_rows, errors, validate_rows
from autopar.errors import AutoparError

RUNS = Path(__file__).resolve().parents[3] / "benchmarks" / "data" / "published_runs.csv"
ROW = Row(
    id="a", source_key="one", model="GPT", layers=2, hidden=64, ffn_hidden=256, n_heads=4, vocab=512, seq_len=128,
    gpu_type="A100-80", num_gpus=8, tp=1, pp=1, micro_batch=1, global_batch=16, precision="bf16", outcome="ok",
)  # fmt: skip


def stand_in(
    seconds: Sequence[float | None], peaks: Sequence[float] = (), fits: Sequence[bool | None] = ()
) -> Estimator:
    """An estimator that says these figures in the order of the rows; None is a row that it does not model."""

    def estimate(rows: Sequence[Row]) -> list[RowEstimate | NoEstimate]:
        assert all(getattr(row, name) is None for row in rows for name in RESULT_COLUMNS)
        found: list[RowEstimate | NoEstimate] = []
        for i, (row, value) in enumerate(zip(rows, seconds, strict=True)):
            if value is None:
                found.append(NoEstimate(id=row.id, reason="not today"))
                continue
            peak, fit = (peaks[i] if peaks else 1.0), (fits[i] if fits else None)
            found.append(RowEstimate(id=row.id, seconds=value, peak_bytes=peak, fits=fit, parts={}))
        return found

    return estimate


def numbered(count: int, **columns: object) -> list[Row]:
    return [replace(ROW, id=f"row{i}", tp=i + 1, **columns) for i in range(count)]


def test_errors() -> None:
    found = errors([-0.5, 0.1, None, 0.2, -0.1])
    assert asdict(found) == pytest.approx(
        {"n": 4, "median": 0.15, "p90": 0.41, "mean": 0.225, "max": 0.5, "bias": 0.0}, abs=1e-12
    )
    assert asdict(errors([None])) == {"n": 0, "median": None, "p90": None, "mean": None, "max": None, "bias": None}


def test_step_time_and_memory() -> None:
    rows = [
        replace(ROW, id="a", step_time_s=2.0, peak_mem_gb=10.0),
        replace(ROW, id="b", step_time_s=4.0),
        replace(ROW, id="c", source_key="two", peak_mem_gb=20.0),
        replace(ROW, id="d", source_key="two", step_time_s=10.0),
        replace(ROW, id="e", source_key=None, hidden=None, step_time_s=1.0),
    ]
    found = validate_rows(rows, stand_in([1.0, 5.0, 3.0, 11.0, None], [9 * 2**30, 1.0, 22 * 2**30, 1.0, 1.0]))
    overall = found.overall
    assert (overall.rows, overall.modelled, overall.stated, overall.stated_modelled) == (5, 4, 4, 4)
    assert (overall.step_time.n, overall.memory.n) == (3, 2)
    assert (overall.step_time.median, overall.step_time.max, overall.step_time.bias) == pytest.approx((0.25, 0.5, 0.1))
    assert (overall.memory.median, overall.memory.bias) == pytest.approx((0.1, 0.0))
    assert list(found.by) == ["(not stated)", "one", "two"]
    assert found.by["one"].step_time.median == pytest.approx(0.375)
    assert found.by["(not stated)"].modelled == 0
    assert found.mean_over_sources == pytest.approx({"step_time": (0.375 + 0.1) / 2, "memory": 0.1})
    assert [one.id for one in found.unmodelled] == ["e"]


def test_json_of_the_measures() -> None:
    data = validate_rows([replace(ROW, step_time_s=2.0)], stand_in([1.0]), by="gpu_type").to_dict()
    overall = data["overall"]
    assert overall["step_time"] == {"n": 1, "median": 0.5, "p90": 0.5, "mean": 0.5, "max": 0.5, "bias": -0.5}
    assert overall["memory"]["n"] == 0 and overall["memory"]["median"] is None
    assert {"rows", "modelled", "step_time", "memory", "ranking", "oom"} <= overall.keys()
    assert data["by"].keys() == {"A100-80"} and data["by"]["A100-80"] == overall


def test_both_counts_of_out_of_memory() -> None:
    outcomes = ["oom", "oom", "oom", "ok", "ok", "ok", None]
    rows = [replace(ROW, id=f"r{i}", outcome=outcome) for i, outcome in enumerate(outcomes)]
    fits = [False, True, None, False, True, True, False]
    oom = validate_rows(rows, stand_in([1.0] * 7, [1.0] * 7, fits)).overall.oom
    assert asdict(oom) == {"oom_rows": 2, "oom_predicted": 1, "ok_rows": 3, "ok_predicted_oom": 1}


def test_rows_that_ran_out_of_memory_have_no_error() -> None:
    row = replace(ROW, outcome="oom", step_time_s=3.0, peak_mem_gb=80.0)
    overall = validate_rows([row], stand_in([1.0])).overall
    assert (overall.step_time.n, overall.memory.n) == (0, 0)


def test_estimator_must_answer_what_it_is_asked() -> None:
    rows = numbered(2)
    with pytest.raises(AutoparError, match="2 rows were given"):
        compared_rows(rows, lambda asked: stand_in([1.0, 2.0])(asked)[:1])
    with pytest.raises(AutoparError, match="2 rows were given"):
        compared_rows(rows, lambda asked: list(reversed(stand_in([1.0, 2.0])(asked))))
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(AutoparError, match="row1 was predicted"):
            compared_rows(rows, stand_in([1.0, wrong]))


def test_assumed_batch_is_used_on_both_sides() -> None:
    row = replace(ROW, global_batch=None, tokens_per_s_per_gpu=100.0)

    def estimate(rows: Sequence[Row]) -> list[RowEstimate]:
        return [RowEstimate(id="a", seconds=5.0, peak_bytes=1.0, fits=None, parts={}, global_batch=32)]

    measured_s = 32 * 128 / (100 * 8)
    assert validate_rows([row], estimate).overall.step_time.bias == pytest.approx(5.0 / measured_s - 1)
    assert validate_rows([row], stand_in([5.0])).overall.step_time.n == 0


# --- ranking -------------------------------------------------------------------------------------------------------


def test_spearman_of_permutations_is_the_closed_form() -> None:
    """Without ties it is 1 - 6·Σd²/(n(n²-1))."""
    for order in permutations(range(5)):
        distance = sum((i - j) ** 2 for i, j in enumerate(order))
        assert spearman(range(5), [float(x) for x in order]) == pytest.approx(1 - 6 * distance / (5 * 24))


def test_spearman_with_ties_is_the_correlation_of_mean_ranks() -> None:
    left, right = [1.0, 1.0, 2.0, 3.0, 3.0, 3.0], [2.0, 1.0, 2.0, 9.0, 8.0, 9.0]
    mean_ranks = ([0.5, 0.5, 2, 4, 4, 4], [1.5, 0, 1.5, 4.5, 3, 4.5])
    assert spearman(left, right) == pytest.approx(float(numpy.corrcoef(*mean_ranks)[0, 1]))
    assert spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0.0


def timed(measured_s: Sequence[float], predicted_s: Sequence[float], **columns: object) -> list[RowTimes]:
    rows = numbered(len(measured_s), **columns)
    return [
        RowTimes(row=row, measured_s=m, predicted_s=p) for row, m, p in zip(rows, measured_s, predicted_s, strict=True)
    ]


def test_regret_is_of_the_layout_predicted_fastest() -> None:
    (group,) = ranked_groups(timed([10, 12, 11, 20, 30], [5, 4, 6, 7, 8]))
    assert (group.layouts, group.predicted_best, group.measured_best) == (5, "row1", "row0")
    assert group.regret == pytest.approx(0.2)
    assert group.correlation == pytest.approx(1 - 6 * (1 + 4 + 1) / (5 * 24))


def test_of_equal_predictions_the_slowest_counts() -> None:
    (group,) = ranked_groups(timed([10, 12, 11, 20, 30], [4, 4, 4, 7, 8]))
    assert group.regret == pytest.approx(0.2)


def test_groups_need_five_layouts_of_the_same_work() -> None:
    five = timed([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert len(ranked_groups(five)) == 1
    assert ranked_groups(five[:4]) == ()
    again = [replace(five[0], row=replace(five[0].row, id=f"again{i}")) for i in range(5)]
    assert ranked_groups([*five[:4], *again]) == ()
    for column, value in (
        *(("model", "other"), ("gpu_type", "H100-SXM"), ("num_gpus", 16), ("global_batch", 32)),
        *(("seq_len", 256), ("precision", "fp8")),
    ):
        other = replace(five[0], row=replace(five[0].row, **{column: value}))
        assert ranked_groups([other, *five[1:]]) == (), column


def test_a_layout_run_twice_counts_once_with_its_median() -> None:
    five = timed([10, 12, 11, 20, 30], [5, 4, 6, 7, 8])
    again = [replace(five[1], measured_s=seconds) for seconds in (10, 20)]
    (group,) = ranked_groups([*five, *again])
    assert group.layouts == 5
    assert group.regret == pytest.approx(0.2)


def test_ranking_of_the_collection() -> None:
    """Predicting what was measured is perfect; the reverse order is as wrong as can be."""
    rows = read_rows(RUNS)
    truth = {row.id: row.step_time_s or row.step_time_derived_s or 1.0 for row in rows}
    perfect = validate_rows(rows, stand_in([truth[row.id] for row in rows])).overall
    assert perfect.step_time.max == pytest.approx(0.0, abs=1e-9)
    num_timed = sum(bool(row.step_time_s or row.step_time_derived_s) for row in rows)
    assert (perfect.modelled, perfect.step_time.n) == (878, num_timed)
    ranking = perfect.ranking
    assert ranking.groups >= 17
    assert ranking.correlation_median == pytest.approx(1.0)
    assert ranking.regret_p90 == pytest.approx(0.0)
    reverse = validate_rows(rows, stand_in([1 / truth[row.id] for row in rows])).overall.ranking
    assert reverse.correlation_median == pytest.approx(-1.0)
    assert reverse.regret_median is not None and reverse.regret_median > 0.1


def test_iteration_times_are_those_of_the_oracles() -> None:
    rows = script("benchmarks/iteration_times.py").iteration_times()
    assert [row.step_time_s for row in rows] == [1.42, 1.10, 18.13, 13.75, 49.05, 37.83, 94.42, 71.49]
    assert [row.vpp for row in rows[::2]] == [1, 3, 3, 1]
    for row in rows:
        assert row.not_stated() == ()
        assert row.num_gpus == row.tp * row.pp * row.dp
        assert row.global_batch == row.dp * row.micro_batch * row.grad_accum
    published = {"22B": 22.07e9, "175B": 174.62e9, "530B": 529.60e9, "1T": 1008.04e9}
    for row in rows:
        assert row.n_params == pytest.approx(published[row.model.removeprefix("GPT ")], rel=1e-3)
