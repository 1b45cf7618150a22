"""The collectives of ZeRO in a step, against the table of docs/semantics.md (S12) and FSDP2's hooks under schedules."""

import pytest
from step_traffic import CollectiveTotal, Ledger, zero_step

from autopar.ir.degrees import Degrees
from autopar.runtime.dry_run.zero import ROOT, ParameterGroup, most_gathered_bytes

CALLS = (100, 200, 300)  # elements of the groups of three calls
SHARED, ITEM = 50, 8


def groups(degrees: Degrees, shared: int = 0) -> list[ParameterGroup]:
    sizes = [(at, size * ITEM) for at, size in enumerate(CALLS)] + [(ROOT, shared * ITEM)] * bool(shared)
    return [
        ParameterGroup(
            call=at,
            names=(),
            shard_bytes=size // degrees.dp_shard,
            stored_bytes=0,
            gradient_bytes=size,
            flows=True,
            ranks=degrees.dp_shard,
        )
        for at, size in sizes
    ]


def sent(degrees: Degrees, shared: int = 0) -> tuple[dict[tuple[str, str], CollectiveTotal], int]:
    ledger = Ledger()
    zero_step(degrees, 0, groups(degrees, shared), ledger)
    return ledger.take(), most_gathered_bytes(degrees, 0, groups(degrees, shared))


@pytest.mark.parametrize("n", (1, 3))
@pytest.mark.parametrize("zero", (1, 2, 3))
@pytest.mark.parametrize("shared", (0, SHARED))
def test_the_table(zero: int, n: int, shared: int) -> None:
    found, _ = sent(Degrees(dp_shard=2, zero=zero, accumulate=n, micro_batch=1), shared)
    total, s = sum(CALLS) + shared, len(CALLS) + bool(shared)
    gathers = {1: (s, total), 2: (s, total), 3: (n * (2 * s - bool(shared)), n * (2 * total - shared))}[zero]
    sums = {1: (s, total), 2: (n * s, n * total), 3: (n * s, n * total)}[zero]
    gathered, summed = found["dp", "all_gather"], found["dp", "reduce_scatter"]
    assert (gathered.calls, gathered.bytes) == (gathers[0], gathers[1] * ITEM // 2)
    assert (summed.calls, summed.bytes) == (sums[0], sums[1] * ITEM)
    assert found.keys() == {("dp", "all_gather"), ("dp", "reduce_scatter")}


def test_replicas_sum_what_is_scattered() -> None:
    found, _ = sent(Degrees(dp_replicate=2, dp_shard=4, zero=2, accumulate=2, micro_batch=1))
    assert found.keys() == {("dp_shard", "all_gather"), ("dp_shard", "reduce_scatter"), ("dp_replicate", "all_reduce")}
    assert found["dp_replicate", "all_reduce"].bytes == found["dp_shard", "reduce_scatter"].bytes // 4
    assert found["dp_replicate", "all_reduce"].calls == 2 * len(CALLS)


@pytest.mark.parametrize("schedule, wasted", (("1f1b", 1), ("gpipe", 1)))
def test_a_pipeline_gathers_one_group_in_vain(schedule: str, wasted: int) -> None:
    """FSDP2 gathers ahead in the order of past forward passes, of which several ran before the first backward."""
    degrees = Degrees(pp=2, dp_shard=2, zero=3, micro_batches=4, micro_batch=1, schedule=schedule)
    found, _ = sent(degrees)
    gathered = found["dp", "all_gather"]
    assert gathered.calls == 2 * len(CALLS) * 4 + wasted
    assert gathered.bytes == (2 * sum(CALLS) * 4 + wasted * CALLS[-1]) * ITEM // 2


def test_a_backward_pass_in_parts_keeps_parameters_gathered() -> None:
    degrees = Degrees(
        pp=2, dp_shard=2, zero=3, micro_batches=4, micro_batch=1, accumulate=2, schedule="interleaved-zero-bubble"
    )
    found, most = sent(degrees, SHARED)
    assert found["dp", "all_gather"].calls == found["dp", "reduce_scatter"].calls == len(CALLS) + 1
    assert most == (sum(CALLS) + SHARED) * ITEM


def test_most_parameters_gathered_at_once() -> None:
    whole = (sum(CALLS) + SHARED) * ITEM
    assert sent(Degrees(dp_shard=2, zero=2, micro_batch=1), SHARED)[1] == whole
    # the root, a group, and the one before it ahead of time
    assert sent(Degrees(dp_shard=2, zero=3, micro_batch=1), SHARED)[1] == (CALLS[-1] + CALLS[-2] + SHARED) * ITEM
