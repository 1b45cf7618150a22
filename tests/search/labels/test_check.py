"""The checker refuses every labelling that has been tampered with."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from label_cases import LAYERS, analysis_of, labelled, program_of

from autopar.errors import PlanError
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.sharding import I, P, R, S
from autopar.search.labels.check import check

Change = Callable[[BlockLabels], BlockLabels]
LAYER = LAYERS["llama"]


def with_port(name: str, *types: object) -> Change:
    return lambda b: replace(b, ports={**b.ports, name: types})


def with_result(name: str, *types: object) -> Change:
    return lambda b: replace(b, results={**b.results, name: types})


def with_label(key: str, *labels: str) -> Change:
    return lambda b: replace(b, labels={**b.labels, key: labels})


@pytest.mark.parametrize(
    ("block", "change", "message"),
    [
        (LAYER, with_port("x", I, I), "is"),
        (LAYER, with_port("x", I), "one type per mesh dimension"),
        (LAYER, with_port("mlp_up_proj_weight", I, S(3)), "no axis"),
        (LAYER, with_port("mlp_up_proj_weight", I, P), "partial"),
        (LAYER, with_port("mlp_up_proj_weight", S(0), S(0)), "split twice"),
        (LAYER, with_label("mlp.up_proj:linear:0", "I", "w.0"), "no variant"),
        (LAYER, with_label("mlp.up_proj:linear:0", "I"), "one label per mesh dimension"),
        (LAYER, with_label("mlp.up_proj:linear:0", "o.0", "o.0"), "split twice"),
        (LAYER, lambda b: replace(b, signature="0"), "another block"),
        ("prologue", with_port("input_ids", I, S(0)), "split along the batch"),
        ("epilogue", with_result("div", R, I), "invariant"),
        ("denominator", with_result("to", I, R), "invariant"),
    ],
)
def test_tampering_is_found(block: str, change: Change, message: str) -> None:
    found = labelled("llama", Degrees(tp=2, dp_shard=2))
    blocks = [change(b) if b.name == block else b for b in found.blocks]
    with pytest.raises(PlanError, match=message):
        check(program_of("llama"), analysis_of("llama"), blocks, found.mesh)


def test_a_missing_block_is_found() -> None:
    found = labelled("llama", Degrees(tp=2))
    with pytest.raises(PlanError, match="labels of"):
        check(program_of("llama"), analysis_of("llama"), found.blocks[1:], found.mesh)
