"""Labels of a search: what blocks cost is the same whichever degrees were asked for before."""

from dataclasses import fields
from typing import Any

import pytest

from autopar.cache.captures import captured_model
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.cluster import ClusterSpec
from autopar.memo import Memo
from autopar.planning.fixed import program_for
from autopar.planning.labels import LABELLED, SearchLabels

pytest.importorskip("transformers")
CLUSTER = ClusterSpec.preset("8xh100")


def plain(works: ProgramWorks) -> dict[str, Any]:
    return {each.name: getattr(works, each.name) for each in fields(works)}


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_degrees_with_the_same_labels_share_what_blocks_cost(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"layers": 2, "seq_len": 64, "dtype": "bfloat16"}
    program = program_for(captured_model(model, folder=None, **sizes).capture, LABELLED)
    alone = {tp: SearchLabels(program, CLUSTER) for tp in (2, 4)}
    expected = {tp: labels.works(tp) for tp, labels in alone.items()}
    assert alone[2].chosen(2)[1].blocks == alone[4].chosen(4)[1].blocks

    both = SearchLabels(program, CLUSTER)
    both.works(2)

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("priced again")

    monkeypatch.setattr("autopar.cost_model.work.export.work_of", fail)
    found = both.works(4)
    assert plain(found) == plain(expected[4])
    assert found.mesh != expected[2].mesh
    with pytest.raises(AssertionError, match="priced again"):
        both.works(1)


def test_searches_that_share_a_memo_get_their_own_labels() -> None:
    """Another program, another cluster, other wishes: each is an input of the memo's keys."""
    memo, told = Memo(), []
    for layers in (2, 3):
        found = captured_model("llama3-8b", folder=None, layers=layers, hidden=256, seq_len=64, dtype="bfloat16")
        program = program_for(found.capture, LABELLED)
        for cluster in (CLUSTER, ClusterSpec.preset("8xa100-80gb")):
            for sequence_parallel, regather in ((None, True), (False, True), (None, False)):
                asked: dict[str, Any] = {"sequence_parallel": sequence_parallel, "regather": regather}
                shared, alone = (SearchLabels(program, cluster, memo=each, **asked) for each in (memo, Memo()))
                for tp in (1, 4):
                    assert shared.chosen(tp)[1].blocks == alone.chosen(tp)[1].blocks
                    for works in ("works", "works_kept"):
                        expected = plain(getattr(alone, works)(tp))
                        assert expected == plain(getattr(shared, works)(tp))
                        told.append(str(expected))
    assert len(set(told)) > 8
