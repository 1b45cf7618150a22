"""Products of experts with few rows: full tiles, weights read once a product, memory bound, never cheaper with more."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.step.block_time import BlockSeconds, computing_seconds
from autopar.cost_model.work.block_work import BlockWork, Operator
from autopar.ir.cluster import ClusterSpec

TILE = 128
ROWS = st.floats(0.25, 20_000)
WIDTHS = st.integers(64, 16_384)
EXPERTS = st.integers(1, 256)


@pytest.fixture(scope="module")
def h100() -> Machine:
    return cluster_machine(ClusterSpec.preset("8xh100"), engine_named("autopar"), mechanisms(), precision="bf16")


def priced(machine: Machine, m: float, n: float, k: float, experts: float) -> BlockSeconds:
    """A block whose only operator multiplies m rows with each of `experts` matrices of k × n."""
    product = Operator(
        name="expert_product", kind="matmul", flops=0.0, m=m, n=n, k=k, count=experts,
        forward_bytes=0.0, backward_bytes=0.0, kernels_forward=1, kernels_backward=2,
    )  # fmt: skip
    work = BlockWork(
        role="moe_layer", products=(product,), eager=(), fused=(), sent=(), saved_eager_bytes=0.0,
        saved_fused_bytes=0.0, saved_operand_bytes=0.0, input_bytes=0.0,
        parameters_split=0.0, parameters_whole=0.0, parameters_expert=0.0,
    )  # fmt: skip
    return computing_seconds(work, machine.speeds, machine.engine, is_narrow=False)


def seconds(machine: Machine, m: float, n: float, k: float, experts: float) -> float:
    """Seconds of both passes."""
    return float(priced(machine, m, n, k, experts).products[0])


def by_hand(machine: Machine, m: float, n: float, k: float, experts: float) -> float:
    """The forward product, and the gradients of rows and of weights, each the longer of its tiles and its bytes."""
    tile, speeds = machine.speeds.tile, machine.speeds
    total = 0.0
    for rows, columns, inner in ((m, n, k), (m, k, n), (k, n, m)):
        tiles = experts * np.ceil(rows / TILE) * np.ceil(columns / TILE)
        flops = 2 * (tiles + tile.units / 4) * TILE**2 * (inner + tile.k_half)  # a quarter of a wave idles
        moved = 2 * experts * (rows * inner + inner * columns + rows * columns)  # every matrix once, 16 bits
        total += speeds.launch_s + max(flops / speeds.product_flops_per_s, moved / speeds.bytes_per_s)
    return total


@settings(deadline=None, max_examples=200)
@given(m=ROWS, n=WIDTHS, k=WIDTHS, experts=EXPERTS)
def test_the_price_has_full_tiles_and_reads_weights_once(h100: Machine, m: float, n: int, k: int, experts: int) -> None:
    assert (h100.speeds.tile.m, h100.speeds.tile.n) == (TILE, TILE)
    assert seconds(h100, m, n, k, experts) == pytest.approx(by_hand(h100, m, n, k, experts), rel=1e-9)


@settings(deadline=None, max_examples=200)
@given(m=ROWS, more=st.floats(0, 5_000), n=WIDTHS, k=WIDTHS, experts=EXPERTS)
def test_more_rows_never_cost_less(h100: Machine, m: float, more: float, n: int, k: int, experts: int) -> None:
    few, many = (seconds(h100, rows, n, k, experts) for rows in (m, m + more))
    assert few <= many * (1 + 1e-12)


def test_few_rows_are_memory_bound_and_many_are_not(h100: Machine) -> None:
    """Forward, below the FLOP of a byte, rows are free beside the weights; far above it they cost in proportion."""
    n, k, experts = 14336, 4096, 64
    per_byte = h100.speeds.product_flops_per_s / h100.speeds.bytes_per_s
    assert 150 < per_byte < 400
    weights = 2 * experts * n * k / h100.speeds.bytes_per_s
    one, tile, many, twice = (priced(h100, m, n, k, experts).forward[0] for m in (1, TILE, 4096, 8192))
    assert weights < one < 1.01 * weights
    assert tile < 1.1 * weights
    assert 1.9 < twice / many < 2.01


# TFLOP/s of 8 experts of 4,096 x 1,792 on one H100 by rows of an expert: forward, and gradient of the weights
MEASURED = {8: (15, 16), 32: (59, 65), 128: (227, 230), 512: (559, 498), 2048: (733, 636)}


@pytest.mark.parametrize("rows", sorted(MEASURED)[:-1])
def test_few_rows_cost_as_measured(h100: Machine, rows: int) -> None:
    """A step has two products at the forward rate and one at the other. Few rows are compared with 2,048.

    Short bursts run at a higher clock than training, for all rows alike (benchmarks/results/2026-11-26-one-h100.md).
    """

    def measured_s(rows: int) -> float:
        forward, weights = MEASURED[rows]
        return 2e-12 * 8 * rows * 4096 * 1792 * (2 / forward + 1 / weights)

    def ratio(rows: int) -> float:
        return seconds(h100, rows, 1792, 4096, 8) / measured_s(rows)

    assert ratio(rows) / ratio(2048) == pytest.approx(1, abs=0.1)
