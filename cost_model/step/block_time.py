"""Seconds of one block on one rank: products, attention, memory-bound kernels, and the host that starts them.

    block    = (device^4 + host^4)^(1/4)        the longer of the two, without a corner where they cross; their sum on
                                                a CPU, which starts operators and runs them in one thread
    device   = products + attention + memory-bound kernels, each by `autopar.cost_model.machine.kernel_times`
    host     = kernels started · host seconds of one (by the engine's way of dispatch); a collective counts as three

Each forward product has two backward products: for the input's gradient, m×n·k, and for the weight's gradient, k×m·n.
A frozen weight has no gradient, and neither has the input of the first trained layer.

Attention that writes its scores runs two batched products. It also moves 9 bytes per score forward. Softmax reads 2
and writes 2; dropout reads 2, writes 2 and writes a mask of 1. Backward moves 11 bytes. The gradients read and write
as many bytes, and also read the saved output of 2. (Saved bytes: Korthikanti et al. 2022, "Reducing activation
recomputation in large transformer models", section 4.1.)

A product in float8 needs casts. Forward, the kernel before writes one byte per element of the input. Backward, the
cast moves three bytes per element of the output's gradient: two read, one written.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.machine.kernel_times import (
    attention_flops,
    attention_seconds,
    matmul_seconds,
    memory_seconds,
    tile_part,
)
from autopar.cost_model.machine.machine import Speeds
from autopar.cost_model.work.block_work import BlockWork, Operator
from autopar.ir.arrays import Floats
from autopar.ir.sharding import owned_by

SCORE_BYTES = (9.0, 11.0)
CAST_BYTES = 3.0
ALIGNED = 8  # elements of 16 bits in 16 bytes, the alignment that tensor cores need
CORNER = 4.0
COLLECTIVE_KERNELS = 3.0  # host cost of a collective in kernel starts: checks, streams and events around its kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of a block without its collectives. The parts after `attention_forward` count both passes."""

    forward: Floats
    backward: Floats
    attention_forward: Floats
    products: Floats
    attention: Floats
    memory: Floats
    waiting: Floats
    weight: Floats  # of the products for the gradients of weights, counted as a third of a product's three


def computing_seconds(
    work: BlockWork[Any], speeds: Speeds, engine: Engine, *, is_narrow: bool, is_split: Any = False
) -> BlockSeconds:
    """Seconds of one micro-batch in one block."""
    zero, fused = np.zeros(1), engine.attention == "fused"
    products, attention, memory = [zero, zero], [zero, zero], [zero, zero]
    kernels: list[Any] = [0.0, 0.0]
    weight: Any = zero
    for sent in work.sent:
        i = 0 if sent.is_forward else 1
        times = 1.0 if sent.times is None else sent.times
        kernels[i] = kernels[i] + COLLECTIVE_KERNELS * times * np.where(is_split, 1.0, 0.0)
    in_parts = engine.sends_by_labels and any(owned_by(sent.mesh_dim) == "sequence" for sent in work.sent)
    for op in work.products:
        if op.kind == "matmul":
            price = _product(op, speeds, is_narrow=is_narrow)
            total, count = products, (1, op.passes - 1)
            weight = weight + (price[0] + price[1]) * (0 if op.only in ("left", "none") else 1 / op.passes)
        elif op.kind == "again":
            price = (zero, _product(op, speeds, is_narrow=is_narrow)[0])
            total, count = products, (0, 1)
        else:
            price = _fused_attention(op, speeds, in_parts=in_parts) if fused else _materialised(op, speeds)
            total, count = attention, (1, 2) if fused else (5, 9)
            if op.only == "none":
                price, count = (price[0], zero), (count[0], 0)
        for i in (0, 1):
            total[i] = total[i] + price[i]
            kernels[i] += count[i]
    for op in work.fused if engine.pointwise == "fused" else work.eager:
        starts = (op.kernels_forward, op.kernels_backward)
        for i, moved in enumerate((op.forward_bytes, op.backward_bytes)):
            spent = memory_seconds(moved_bytes=moved, bytes_per_s=speeds.bytes_per_s, launch_s=0.0)
            memory[i] = memory[i] + spent + starts[i] * speeds.launch_s
    # an eager framework's host walks through every operator, even if fused kernels replace some of them
    for op in work.eager if engine.dispatch == "eager" else work.fused:
        kernels = [kernels[0] + op.kernels_forward, kernels[1] + op.kernels_backward]
    device = [products[i] + attention[i] + memory[i] for i in (0, 1)]
    host = [kernels[i] * speeds.host_s for i in (0, 1)]
    corner = 1.0 if speeds.in_one_thread else CORNER
    whole = [(device[i] ** corner + host[i] ** corner) ** (1 / corner) for i in (0, 1)]
    return BlockSeconds(
        forward=whole[0],
        backward=whole[1],
        attention_forward=attention[0],
        products=products[0] + products[1],
        attention=attention[0] + attention[1],
        memory=memory[0] + memory[1],
        waiting=whole[0] + whole[1] - device[0] - device[1],
        weight=weight,
    )


def _product(op: Operator[Any], speeds: Speeds, *, is_narrow: bool) -> tuple[Floats, Floats]:
    m, n, k, count = op.m, op.n, op.k, op.count
    low = is_narrow and speeds.narrow_flops_per_s is not None
    forward = _matmul(m, n, k, count, speeds, low)
    backward = np.zeros(1)
    if op.only in (None, "left"):
        backward = backward + _matmul(m, k, n, count, speeds, low)
    if op.only in (None, "right"):
        backward = backward + _matmul(k, n, m, count, speeds, low)
    if low:
        forward = forward + count * m * k / speeds.bytes_per_s
        backward = backward + (op.only != "none") * CAST_BYTES * count * m * n / speeds.bytes_per_s
    return forward, backward


def _matmul(m: Any, n: Any, k: Any, count: Any, speeds: Speeds, is_narrow: bool) -> Floats:
    rate = speeds.narrow_flops_per_s if is_narrow else speeds.product_flops_per_s
    assert rate is not None
    # The start and end of a tile take the same time at any rate. A faster unit could compute more of k in this time.
    faster = rate / speeds.product_flops_per_s
    tile = replace(speeds.tile, k_half=speeds.tile.k_half * faster)
    return matmul_seconds(
        flops=2.0 * count * m * n * k,
        moved_bytes=2.0 * count * (m * k + k * n + m * n),
        part=tile_part(tile, m, n, k, count),
        peak_flops_per_s=rate,
        bytes_per_s=speeds.bytes_per_s,
        launch_s=speeds.launch_s,
    )


def _fused_attention(op: Operator[Any], speeds: Speeds, *, in_parts: bool) -> tuple[Floats, Floats]:
    """Seconds of both passes. With `in_parts` a rank has some queries and needs more keys, which come in parts."""
    slower = np.where(np.asarray(op.m) < op.n, 1.0 / speeds.attention_in_parts, 1.0) if in_parts else 1.0
    flops = slower * attention_flops(op.count, op.m, op.n, op.k, is_causal=op.sees is None)
    forward, backward = (
        attention_seconds(
            flops=flops,
            keys=op.n,
            attention=speeds.attention,
            peak_flops_per_s=speeds.peak_flops_per_s,
            launch_s=speeds.launch_s,
            is_backward=back,
        )
        for back in (False, True)
    )
    return forward, backward


def _materialised(op: Operator[Any], speeds: Speeds) -> tuple[Floats, Floats]:
    m, n, k, count = op.m, op.n, op.k, op.count
    slow = np.where(np.mod(k, ALIGNED) == 0, 1.0, speeds.misaligned)
    products = slow * (_matmul(m, n, k, count, speeds, False) + _matmul(m, k, n, count, speeds, False))
    scores = count * m * n / speeds.bytes_per_s
    return (
        products + SCORE_BYTES[0] * scores + 2 * speeds.launch_s,
        2 * products + SCORE_BYTES[1] * scores + 3 * speeds.launch_s,
    )
