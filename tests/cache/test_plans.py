"""Kept searches: the same question is answered at once, another one is searched."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar.cache.plans as plan_cache
from autopar.cache.captures import CapturedModel, captured_model
from autopar.cache.plans import kept_search
from autopar.ir.cluster import ClusterSpec
from autopar.planning.options import PlanOptions
from autopar.search.result.result import SearchResult

pytest.importorskip("transformers")
CLUSTER = ClusterSpec.preset("4xh100")
ASKED = PlanOptions(global_batch=8, fix={"pp": 1}, precision="bf16", trials=0)


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    return captured_model("gpt2", folder=None, layers=2, hidden=64, seq_len=16, dtype="bfloat16")


def kept(
    folder: Path, captured: CapturedModel, asked: PlanOptions = ASKED, cluster: ClusterSpec = CLUSTER
) -> SearchResult:
    return kept_search(folder, captured, cluster, asked, on_progress=lambda _: None)


def test_an_equal_question_is_not_searched_again(
    captured: CapturedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kept(tmp_path, captured)
    assert len(list((tmp_path / "plans").iterdir())) == 1

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("autopar.planning.captured_search.search_captured", fail)
    again = kept(tmp_path, captured)
    assert again.notes[-1].startswith("found by an earlier search, kept as ")
    texts = [json.dumps(one.to_dict(), sort_keys=True) for one in (replace(again, notes=first.notes), first)]
    assert texts[0] == texts[1]
    assert again.plan == first.plan
    other = (
        replace(ASKED, global_batch=16),
        replace(ASKED, seed=1),
        replace(ASKED, forbid={"zero": 0}),
        replace(ASKED, report=True),
        replace(ASKED, timeout_s=100.0),  # may have ended early
    )
    for asked in other:
        with pytest.raises(AssertionError, match="searched"):
            kept(tmp_path, captured, asked)
    dearer = replace(CLUSTER, groups=tuple(replace(one, price_usd_per_device_hour=3.0) for one in CLUSTER.groups))
    with pytest.raises(AssertionError, match="searched"):
        kept(tmp_path, captured, cluster=dearer)
    monkeypatch.setattr(plan_cache, "versions", lambda _: {"source": "other"})
    with pytest.raises(AssertionError, match="searched"):
        kept(tmp_path, captured)


def test_a_damaged_file_is_written_anew(captured: CapturedModel, tmp_path: Path) -> None:
    first = kept(tmp_path, captured)
    file = next((tmp_path / "plans").iterdir())
    for damaged in ("{", '{"kind": "other"}', file.read_text()[:-100]):
        file.write_text(damaged)
        notes: list[str] = []
        again = kept_search(tmp_path, captured, CLUSTER, ASKED, on_progress=notes.append)
        assert again.plan == first.plan
        assert notes[0].startswith(f"the kept search {file} cannot be read and is made anew: ")
        assert SearchResult.from_dict(json.loads(file.read_text())).plan == first.plan


def test_a_folder_that_cannot_be_written_does_no_harm(captured: CapturedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert kept(tmp_path / "file" / "plans", captured).plan is not None
