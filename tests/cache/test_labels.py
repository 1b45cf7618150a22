"""Kept labels: after reading, every candidate has the same price as before writing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.cache.captures import captured_model
from autopar.cache.labels import labels_file, read_labels
from autopar.cost_model.work.block_work import free_symbols
from autopar.ir.cluster import ClusterSpec
from autopar.planning.fixed import program_for
from autopar.planning.labels import LABELLED, SearchLabels
from autopar.planning.machine import machinery_of
from autopar.search.bounds.lower_bounds import screen
from autopar.search.space.candidates import candidates
from autopar.search.space.dimensions import Constraints

pytest.importorskip("transformers")
CLUSTER = ClusterSpec.preset("8xh100")


@pytest.fixture(scope="module", params=("llama3-8b", "mixtral-8x7b"))
def program(request: pytest.FixtureRequest) -> Any:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "seq_len": 16, "dtype": "bfloat16"}
    return program_for(captured_model(request.param, folder=None, **sizes).capture, LABELLED)


def test_what_is_read_is_what_was_kept(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SearchLabels(program, CLUSTER, folder=tmp_path)
    chosen = {tp: first.works(tp) for tp in (1, 2)}
    assert len(list(tmp_path.iterdir())) == 2

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("chosen again")

    monkeypatch.setattr("autopar.planning.labels.choose_labels", fail)
    again = SearchLabels(program, CLUSTER, folder=tmp_path)
    for tp, works in chosen.items():
        read = again.works(tp)
        names = [name for name in works.__dataclass_fields__ if name != "family"]
        assert [getattr(read, name) for name in names] == [getattr(works, name) for name in names]
        assert read.family == works.family
        assert again.chosen(tp)[0] == first.chosen(tp)[0]
        assert again.chosen(tp)[1] == first.chosen(tp)[1]
        on = machinery_of(CLUSTER, None, "bf16")
        every = candidates(Constraints(num_devices=8, global_batch=16, most_stages=2, tensor_degrees=(tp,)))
        assert np.array_equal(screen(read, every, on).seconds, screen(works, every, on).seconds)
    with pytest.raises(AssertionError, match="chosen again"):
        SearchLabels(program, CLUSTER, False, folder=tmp_path).works(1)
    with pytest.raises(AssertionError, match="chosen again"):
        SearchLabels(program, ClusterSpec.preset("8xa100-80gb"), folder=tmp_path).works(1)


def test_a_split_sequence_can_be_read(program: Any, tmp_path: Path) -> None:
    """Blocks outside of the split sequence have its whole length, which is a number of context ranks times a part."""
    works = SearchLabels(program, CLUSTER, folder=tmp_path).works(1, 2)
    assert "cp" in free_symbols(works.family)
    assert read_labels(next(tmp_path.iterdir()))[2].family == works.family


def test_a_tensor_degree_in_two_mesh_dimensions(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "seq_len": 16, "dtype": "bfloat16"}
    llama = program_for(captured_model("llama3-8b", folder=None, **sizes).capture, LABELLED)
    works = SearchLabels(llama, CLUSTER, folder=tmp_path).works(8)
    assert works.mesh.names == ("dp", "tp0", "tp1")
    read = read_labels(next(tmp_path.iterdir()))
    assert read[2].family == works.family


def test_a_damaged_file_is_reported_and_written_anew(program: Any, tmp_path: Path) -> None:
    file = labels_file(tmp_path, program, CLUSTER, LABELLED)
    SearchLabels(program, CLUSTER, folder=tmp_path).works(1)
    text, notes = file.path.read_text(), list[str]()
    for damaged in ("", "[]", "{}", text[:-50], text.replace('"gap"', '"gaps"'), text.replace('"products"', '"p"')):
        file.path.write_text(damaged)
        assert file.read(read_labels, notes.append) is None
        assert notes[-1].startswith(f"the kept labels {file.path} cannot be read and is made anew: ")
    SearchLabels(program, CLUSTER, folder=tmp_path, on_progress=notes.append).works(1)
    assert len(notes) == 7
    assert file.read(read_labels, notes.append) is not None and len(notes) == 7


def test_what_blocks_cost_that_keep_what_they_gather(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SearchLabels(program, CLUSTER, sequence_parallel=True, folder=tmp_path)
    again, kept = first.works(2), first.works(2, keeps=True)
    assert again.regathers and not kept.regathers and not kept.regather
    assert first.works(1, keeps=True).family == first.works(1).family  # gathers nothing
    assert len(list(tmp_path.iterdir())) == 3

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr("autopar.planning.labels.choose_labels", fail)
    monkeypatch.setattr("autopar.planning.labels.merged_works", fail)
    read = SearchLabels(program, CLUSTER, sequence_parallel=True, folder=tmp_path).works(2, keeps=True)
    assert read.family == kept.family and read.regather is False
