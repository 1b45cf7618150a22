"""Offload on gloo ranks: equal bits with the plan on the device, and the bytes that were priced."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from priced_models import GPT2, LLAMA, RANKS, Case, case, planned_case
from step_traffic import HostMoves, host_moves, run_stages
from suites import thinned

from autopar.ir.offload import OFFLOADS
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.dry_run.memory import memory_of
from autopar.runtime.dry_run.rank_view import rank_view

PLANS = (
    case(LLAMA, tp=4, sequence_parallel=True),
    case(LLAMA, tp=2, dp=2, zero=1, accumulate=2),
    case(LLAMA, tp=2, dp=2, zero=2, accumulate=2, sequence_parallel=True),
    case(LLAMA, tp=2, dp=2, zero=3, accumulate=2, sequence_parallel=True, recompute="full"),
    case(LLAMA, dp=4, zero=3, accumulate=2, recompute="full", recompute_blocks=1),
    case(LLAMA, dp_replicate=2, dp_shard=2, zero=3, accumulate=2),
    case(LLAMA, pp=2, tp=2, micro_batches=4, sequence_parallel=True),
    case(GPT2, pp=2, dp=2, zero=2, micro_batches=4),
    case(GPT2, pp=2, dp=2, zero=3, micro_batches=4, schedule="zbv-zero-bubble"),
    case(GPT2, tp=2, dp=2, zero=3, accumulate=2),
    case(LLAMA, tp=2, dp=2, zero=2, accumulate=2, precision="bf16"),
    case(LLAMA, dp=4, zero=3, accumulate=2, precision="bf16", recompute="selective", loss_chunks=4),
    case(GPT2, pp=2, dp=2, zero=1, micro_batches=4, precision="bf16", reduce_dtype="bf16"),
)
CASES = [(plan, offload) for plan in PLANS for offload in OFFLOADS[1:]]
SHORT = [CASES[33], CASES[49]]  # each kind of offload, and a pipeline


def named(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


@pytest.mark.parametrize("one", thinned(PLANS, keep=[PLANS[10]]), ids=named)
def test_training_has_equal_bits(one: Case, worlds: Callable[[int], Ranks]) -> None:
    _, plan = planned_case(one)
    world = worlds(RANKS)
    expected = world.run("offload_ranks:trained", one, plan, OFFLOADS[0])
    for offload in OFFLOADS[4:]:
        for (losses, weights), (own_losses, own_weights) in zip(
            expected, world.run("offload_ranks:trained", one, plan, offload), strict=True
        ):
            assert losses == own_losses, offload
            assert weights.keys() == own_weights.keys()
            assert [name for name, value in weights.items() if not torch.equal(value, own_weights[name])] == []


@pytest.mark.parametrize(("one", "offload"), thinned(CASES, keep=SHORT), ids=named)
def test_moved_bytes_are_the_priced_ones(one: Case, offload: str, worlds: Callable[[int], Ranks]) -> None:
    program, plan = planned_case(one)
    plan = replace(plan, degrees=replace(plan.degrees, offload=offload))
    for rank, counted in enumerate(worlds(RANKS).run("offload_ranks:moved", one, plan)):
        setting = rank_view(program, plan, rank)
        assert HostMoves(**counted) == host_moves(setting, run_stages(setting)), f"rank {rank}"


HELD = [(plan, offload) for plan in PLANS[:3] + PLANS[7:8] + PLANS[10:] for offload in ("optimizer", "parameters")]


@pytest.mark.parametrize(("one", "offload"), thinned(HELD, keep=HELD[3:4]), ids=named)
def test_bytes_on_the_host_are_the_priced_ones(one: Case, offload: str, worlds: Callable[[int], Ranks]) -> None:
    """A buffer of gradients that FSDP2 sums at once has its padding; so the count is within one percent."""
    program, plan = planned_case(one)
    plan = replace(plan, degrees=replace(plan.degrees, offload=offload))
    for rank, counted in enumerate(worlds(RANKS).run("offload_ranks:held_on_host", one, plan)):
        setting = rank_view(program, plan, rank)
        runs = run_stages(setting)
        held = memory_of(setting, runs)
        assert counted == pytest.approx(held.host_bytes, rel=0.01), f"rank {rank}"
        here = memory_of(replace(setting, plan=planned_case(one)[1]), runs)
        assert held.total_bytes < here.total_bytes
        assert held.optimizer_bytes < here.optimizer_bytes / 100


@pytest.mark.parametrize("one", [PLANS[0], PLANS[6]], ids=named)
def test_saved_activations_leave_the_device(one: Case) -> None:
    """The block that computes keeps its own tensors. All others are on the host."""
    program, plan = planned_case(one)
    here, there = (
        rank_view(program, replace(plan, degrees=replace(plan.degrees, offload=offload)), 0)
        for offload in ("none", "activations")
    )
    before, after = (memory_of(setting, run_stages(setting)) for setting in (here, there))
    assert after.saved_bytes < before.saved_bytes
    assert after.host_bytes >= before.saved_bytes - after.saved_bytes
    assert after.workspace_bytes >= before.workspace_bytes
    assert after.total_bytes < before.total_bytes


STEPS = [
    (PLANS[3], "optimizer", True),
    (PLANS[3], "parameters", True),
    (PLANS[1], "parameters+activations", True),
    (PLANS[0], "optimizer", True),
    (PLANS[6], "optimizer", False),
    (PLANS[3], "none", False),
]


@pytest.mark.parametrize(("one", "offload", "is_early"), thinned(STEPS, keep=STEPS[:1]), ids=named)
def test_steps_in_the_backward_pass_have_equal_bits(
    one: Case, offload: str, is_early: bool, worlds: Callable[[int], Ranks]
) -> None:
    _, plan = planned_case(one)
    plan = replace(plan, degrees=replace(plan.degrees, offload=offload))
    after, inside = (worlds(RANKS).run("offload_ranks:trained_in_backward", one, plan, way) for way in (False, True))
    for (losses, weights, _), (own_losses, own_weights, early) in zip(after, inside, strict=True):
        assert losses == own_losses
        assert [name for name, value in weights.items() if not torch.equal(value, own_weights[name])] == []
        assert bool(early) == is_early


OPTIMIZERS = ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "SGD")
TRAINED = [(name, offload) for name in OPTIMIZERS for offload in ("optimizer", "parameters")]


@pytest.mark.parametrize(("name", "offload"), thinned(TRAINED, keep=[("Adafactor", "optimizer")]))
def test_every_optimizer_has_equal_bits(name: str, offload: str, worlds: Callable[[int], Ranks]) -> None:
    """Also the ones that get whole matrices, which are gathered on the host."""
    _, plan = planned_case(PLANS[3])
    world, given = worlds(RANKS), (PLANS[3], plan)
    (here, _), (there, _) = (
        zip(*world.run("offload_ranks:trained", *given, one, name, None), strict=True) for one in ("none", offload)
    )
    assert here == there
