"""Labels of a search: what blocks cost is the same whichever degrees were asked for before."""

from typing import Any

import pytest

from autopar.cache.captures import captured_model
from autopar.ir.cluster import ClusterSpec
from autopar.planning.fixed import program_for
from autopar.planning.labels import LABELLED, SearchLabels

pytest.importorskip("transformers")
CLUSTER = ClusterSpec.preset("8xh100")


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_degrees_with_the_same_labels_share_what_blocks_cost(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"layers": 2, "seq_len": 64, "dtype": "bfloat16"}
    program = program_for(captured_model(model, folder=None, **sizes).capture, LABELLED)
    alone = {tp: SearchLabels(program, CLUSTER) for tp in (2, 4)}
    expected = {tp: labels.works(tp) for tp, labels in alone.items()}
    assert alone[2].chosen[2][1].blocks == alone[4].chosen[4][1].blocks

    both = SearchLabels(program, CLUSTER)
    both.works(2)

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("priced again")

    monkeypatch.setattr("autopar.cost_model.work.export.work_of", fail)
    found = both.works(4)
    names = found.__dataclass_fields__
    assert {name: getattr(found, name) for name in names} == {name: getattr(expected[4], name) for name in names}
    assert found.mesh != expected[2].mesh
    with pytest.raises(AssertionError, match="priced again"):
        both.works(1)
