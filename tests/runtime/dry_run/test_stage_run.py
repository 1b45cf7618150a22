"""The saved and sent bytes of one rank in a micro-batch of a Megatron-like model, against closed forms.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4 and table 2: per
layer and for 16-bit values, with s sequence, b batch, h hidden, a heads, t ranks and dropout masks of a byte. No data
is held, so the sizes are those of their 22B model.
"""

from functools import cache

import pytest
import torch
from step_traffic import StageTraffic, run_stage, run_stages, sends_of
from tiny_models import Megatron

from autopar.capture.analysis import analyse
from autopar.capture.program import capture_program
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.dry_run.rank_view import RankView, rank_view
from autopar.search.labels.solve import label

SEQUENCE, BATCH, HIDDEN, HEADS = 2048, 4, 6144, 64
SBH = SEQUENCE * BATCH * HIDDEN
SCORES = 5 * HEADS * SEQUENCE / HIDDEN


@cache
def program(layers: int) -> Program:
    with torch.device("meta"):
        model = Megatron(HIDDEN, HEADS, layers=layers).bfloat16()
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device="meta")
    return capture_program(model, {"input_ids": ids, "labels": ids.clone()})


def setting(layers: int, degrees: Degrees, *, regather: bool = True) -> RankView:
    captured = program(layers)
    analysis = analyse(captured, degrees.mesh)
    labels = label(captured, analysis, degrees, ClusterSpec.preset("8xh100")).blocks
    plan = Plan(fingerprint=captured.fingerprint, model="", degrees=degrees, blocks=labels, regather=regather)
    return rank_view(captured, plan, 0)


def run(layers: int, degrees: Degrees, *, regather: bool = True) -> StageTraffic:
    made = setting(layers, degrees, regather=regather)
    return run_stage(made, made.stages[0])


def saved_of_a_layer(degrees: Degrees, *, regather: bool = True) -> int:
    """What one more layer keeps."""
    more, few = (run(layers, degrees, regather=regather).saved_bytes for layers in (3, 2))
    return more - few


@pytest.mark.parametrize("tp", (1, 2, 4, 8))
def test_saved_bytes_of_a_layer(tp: int) -> None:
    split = SBH * (10 + 24 / tp + SCORES / tp)
    assert saved_of_a_layer(Degrees(tp=tp, sequence_parallel=False)) == pytest.approx(split, rel=0.01)
    if tp > 1:
        whole = SBH * (34 + SCORES) / tp
        parallel = Degrees(tp=tp, sequence_parallel=True)
        assert saved_of_a_layer(parallel) == pytest.approx(whole, rel=0.01)
        gathered = 2 * SBH * 2 * (1 - 1 / tp)  # the inputs of both products, if they are not gathered again
        assert saved_of_a_layer(parallel, regather=False) == pytest.approx(whole + gathered, rel=0.01)


def test_full_recomputation_keeps_a_layers_input() -> None:
    assert saved_of_a_layer(Degrees(tp=8, sequence_parallel=False, recompute="full")) == 2 * SBH
    assert saved_of_a_layer(Degrees(tp=8, sequence_parallel=True, recompute="full")) == 2 * SBH / 8


def test_a_layers_collectives_and_their_bytes() -> None:
    """Two all-reduces of 2sbh bytes forward and two backward; recomputation sends its own again."""
    sums = []
    for layers in (2, 3):
        found = run(layers, Degrees(tp=8, sequence_parallel=False))
        sums.append([way["tp", "all_reduce"] for way in (found.forward, found.backward)])
    for few, more in zip(*sums, strict=True):
        assert (more.calls - few.calls, more.bytes - few.bytes) == (2, 2 * 2 * SBH)
    again = [run(layers, Degrees(tp=8, sequence_parallel=False, recompute="full")).backward for layers in (2, 3)]
    few, more = (one["tp", "all_reduce"] for one in again)
    assert more.calls - few.calls == 4  # the last is needed too, for the mask of the dropout behind it


def test_a_rank_alone_sends_nothing() -> None:
    made = setting(2, Degrees())
    assert sends_of(made, run_stages(made)) == {}
