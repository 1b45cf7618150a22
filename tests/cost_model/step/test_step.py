"""The closed form of a step: what must grow, what must fall, and that its parts add up."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.published.estimate import estimate_rows, prepare
from autopar.cost_model.published.row import Row, RowEstimate

GPT = Row(
    id="gpt", layers=48, hidden=8192, ffn_hidden=32768, n_heads=64, vocab=51200, seq_len=2048, gpu_type="A100-80",
    num_gpus=512, gpus_per_node=8, tp=8, pp=4, dp=16, zero=1, micro_batch=1, global_batch=512, recompute="full",
    precision="bf16", engine="megatron-2021", attention="materialised",
)  # fmt: skip


def estimate(**changes: Any) -> RowEstimate:
    (found,) = estimate_rows([replace(GPT, **changes)])
    assert isinstance(found, RowEstimate)
    return found


@pytest.mark.parametrize("engine", ["megatron-2021", "megatron", "fsdp", "llm-foundry"])
@pytest.mark.parametrize("zero, pp", [(0, 4), (1, 4), (3, 1)])
def test_parts_add_up(engine: str, zero: int, pp: int) -> None:
    found = estimate(engine=engine, zero=zero, pp=pp, dp=64 // pp)
    assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=1e-9)
    assert all(part >= 0 for part in found.parts.values())


def test_more_work_takes_longer() -> None:
    base = estimate().seconds
    assert estimate(layers=96).seconds > base
    assert estimate(hidden=12288, ffn_hidden=49152, n_heads=96).seconds > base
    assert estimate(global_batch=1024).seconds > base
    assert estimate(recompute="none").seconds < base


def test_faster_machines_take_less() -> None:
    base = estimate(engine="megatron", attention="fused")
    assert estimate(engine="megatron", attention="fused", gpu_type="H100-SXM").seconds < base.seconds
    slow, fast = (
        estimate(inter_gb_per_s=rate / 64, tp=1, pp=1, dp=512, zero=3, engine="fsdp").seconds for rate in (100, 1600)
    )
    assert fast < slow


def test_stages_cost_a_bubble_that_falls_with_micro_batches() -> None:
    shares = [(found := estimate(global_batch=batch)).parts["bubble"] / found.seconds for batch in (64, 256, 1024)]
    assert shares == sorted(shares, reverse=True)
    # (p-1)/(n+p-1) of the pipeline: 3/7 of it at n = 4
    assert 0.2 < shares[0] < 3 / 7


def test_interleaving_divides_the_bubble() -> None:
    plain, interleaved = estimate(vpp=1), estimate(vpp=4)
    assert interleaved.parts["bubble"] < plain.parts["bubble"] / 3


@pytest.mark.parametrize("zero", [1, 2])
def test_from_stage_one_on_a_rank_updates_its_shard(zero: int) -> None:
    whole, shard = estimate(zero=0).parts["optimizer"], estimate(zero=zero).parts["optimizer"]
    assert shard == pytest.approx(whole / 16, rel=1e-9)


def test_tensor_parallelism_over_hosts_is_dearer() -> None:
    inside, across = estimate(tp=8, dp=16), estimate(tp=16, dp=8)
    assert across.parts["tensor collectives"] > 2 * inside.parts["tensor collectives"]


def test_memory_falls_with_splitting() -> None:
    rows = [
        {"tp": 1, "pp": 1, "dp": 512, "zero": zero, "engine": "fsdp", "attention": "fused"} for zero in (0, 1, 2, 3)
    ]
    peaks = [estimate(**row).peak_bytes for row in rows]
    assert peaks == sorted(peaks, reverse=True)
    assert estimate(tp=8).peak_bytes < estimate(tp=4, dp=32).peak_bytes
    assert estimate(recompute="full").peak_bytes < estimate(recompute="none").peak_bytes


def test_many_rows_at_once_are_priced_as_one_by_one() -> None:
    rows = [
        replace(GPT, id=f"{tp}-{pp}-{b}", tp=tp, pp=pp, dp=512 // tp // pp, micro_batch=b)
        for tp in (1, 2, 8)
        for pp in (1, 2, 4)
        for b in (1, 2)
    ]
    together = estimate_rows(rows)
    alone = [estimate_rows([row])[0] for row in rows]
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one, RowEstimate)
        assert isinstance(other, RowEstimate)
        assert one.seconds == pytest.approx(other.seconds, rel=1e-12)
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=1e-12)


def test_a_mechanism_costs_what_it_says() -> None:
    """Without what it hides, a step of the engine that hides tensor collectives is longer by that."""
    row = replace(GPT, engine="megatron", attention="fused", sp=True)
    (group,), _ = prepare([row])
    constants = mechanisms()
    assert engine_named("megatron").tensor_overlap == "pipelined"
    hidden = group.step(constants, group.profile)
    shown = group.step(replace(constants, pipelined_hidden=0.0), group.profile)
    left = 1 - constants.pipelined_hidden
    np.testing.assert_allclose(hidden.parts["tensor collectives"], left * shown.parts["tensor collectives"], rtol=1e-9)
