"""Labels of a search: what blocks cost is the same whichever degrees were asked for before."""

from dataclasses import fields, replace
from typing import Any

import pytest

from autopar.cache.captures import captured_model
from autopar.cost_model.work.block_work import VARIANTS
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
                    for keeps in (False, True):
                        expected = plain(alone.works(tp, keeps=keeps))
                        assert expected == plain(shared.works(tp, keeps=keeps))
                        told.append(str(expected))
    assert len(set(told)) > 8


def labels_of_experts(dispatch: str | None = None) -> SearchLabels:
    """Labels of a mixture of 128 experts of which a token chooses 8."""
    sizes: dict[str, Any] = {"layers": 1, "seq_len": 64, "dtype": "bfloat16"}
    captured = captured_model("qwen3-30b-a3b", folder=None, **sizes).capture
    return SearchLabels(
        program_for(captured, LABELLED),
        CLUSTER,
        program_of=lambda batch: program_for(captured, replace(LABELLED, dp_shard=batch)),
        dispatch=dispatch,
    )


def sent_by_expert_ranks(works: ProgramWorks) -> set[str]:
    blocks = [works.family.block(role, VARIANTS[0]) for role in works.family.roles]
    every = {sent.collective for block in blocks for sent in block.sent if sent.mesh_dim == "ep"}
    return every - {"all_reduce"}  # of the loss


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 2)])
def test_expert_degrees_from_the_experts_of_a_token_on_share_labels_that_exchange(tp: int, cp: int) -> None:
    labels = labels_of_experts()
    assert labels.experts_of_token == 8
    for ep in (8, 16, 128):
        assert labels.chosen(tp, cp, ep) is labels.chosen(tp, cp, 8)
        assert sent_by_expert_ranks(labels.works(tp, cp, ep)) == {"all_to_all"}
    for ep in (2, 4):  # they take the cheaper way
        assert labels.chosen(tp, cp, ep)[0].ep == ep
    assert sent_by_expert_ranks(labels.works(tp, cp, 2)) == {"all_gather", "reduce_scatter"}


def test_expert_degrees_share_labels_with_a_given_dispatch_only_if_it_exchanges() -> None:
    assert {labels_of_experts("exchange").chosen(1, 1, ep)[0].ep for ep in (2, 16)} == {2}
    gathered = labels_of_experts("gather")
    for ep in (2, 16):
        assert gathered.chosen(1, 1, ep)[0].ep == ep
        assert sent_by_expert_ranks(gathered.works(1, 1, ep)) == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("dispatch", [None, "exchange", "gather"])
def test_tensor_and_context_ranks_leave_experts_whole_for_expert_ranks(dispatch: str | None) -> None:
    degrees, found, _ = labels_of_experts(dispatch).chosen(2, 2, 128)
    place = degrees.mesh.names.index("ep")
    split = {
        name: types[place]
        for block in found.blocks
        for name, types in block.ports.items()
        if "expert" in name and types[place].kind == "S"
    }
    assert split


def test_labels_of_context_ranks_beside_tensor_ranks_are_legal_in_the_order_of_the_mesh() -> None:
    """`tp` is solved before `cp`, and lies inside it. A vocabulary that both split would not be one range."""
    captured = captured_model("llama3-8b", folder=None, layers=1, seq_len=64, dtype="bfloat16").capture
    labels = SearchLabels(program_for(captured, LABELLED), CLUSTER)
    for cp in (2, 4):
        own = labels.of(program_for(captured, LABELLED), replace(LABELLED, tp=2, cp=cp))
        assert own is not None and own[0].cp == cp
