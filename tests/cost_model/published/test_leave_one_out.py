"""The folds that `tools/leave_one_out.py` makes of published rows."""

from pathlib import Path

from pytest import MonkeyPatch

from autopar.cost_model.published.row import read_rows

ROOT = Path(__file__).parents[3]
RUNS = ROOT / "benchmarks" / "data" / "published_runs.csv"


def test_folds_keep_a_source_apart(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from leave_one_out import folds

    rows = [row for row in read_rows(RUNS) if row.tier == "core"]
    found = folds(rows)
    assert len({fold.group for fold in found}) == len(found)
    for fold in found:
        assert {rows[i].source_key for i in fold.test} == {fold.group}
        assert fold.group not in {rows[i].source_key for i in fold.train}
        known = {(rows[i].gpu_type, rows[i].precision) for i in fold.train}
        assert all((rows[i].gpu_type, rows[i].precision) in known for i in fold.test)
    everywhere = folds(rows, elsewhere=())
    assert sorted(i for fold in everywhere for i in fold.test) == list(range(len(rows)))
    assert "amd_primus" not in {fold.group for fold in found}
