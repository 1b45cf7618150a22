"""Seconds of single kernels and collectives by a device profile, over NumPy arrays.

`autopar.cost_model.fit.device` fits these formulas, so the meaning of a calibration is written once.

Tiling leaves a part of full efficiency to `count` products of m×k by k×n:

    tiles = count · ⌈m/tile_m⌉ · ⌈n/tile_n⌉
    waves = tiles / units
    part  = (count·m·n) / (tiles·tile_m·tile_n) · waves / (waves + 1/4) · k / (k + k_half)

The last wave is rarely full. It leaves a quarter of a wave idle. A device of one unit has no waves.

Sources. Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 5.8, measures
the effect. NVIDIA, "Matrix Multiplication Background User's Guide", sections 4-5, explains tile and wave quantisation.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from autopar.cost_model.machine.profile import AttentionEfficiency, CallCost, Tile
from autopar.ir.arrays import Floats

# A fused backward pass computes the scores again: five products for the two of the forward pass. Dao 2023,
# "FlashAttention-2", section 4.1, counts 2.5 times the forward FLOP.
BACKWARD_PER_FORWARD = 2.5
IDLE_WAVE = 0.25


def tile_part(tile: Tile, m: ArrayLike, n: ArrayLike, k: ArrayLike, count: ArrayLike = 1.0) -> Floats:
    """The part, above 0 and at most 1, of full efficiency that a product's shape allows."""
    m, n, k, count = (np.asarray(arg, dtype=np.float64) for arg in (m, n, k, count))
    tiles = count * np.ceil(m / tile.m) * np.ceil(n / tile.n)
    filled = count * m * n / (tiles * tile.m * tile.n)
    waves = tiles / tile.units
    idle = IDLE_WAVE if tile.units > 1 else 0.0
    return _floats(filled * waves / (waves + idle) * k / (k + tile.k_half))


def matmul_seconds(
    *,
    flops: ArrayLike,
    moved_bytes: ArrayLike,
    part: ArrayLike,
    peak_flops_per_s: float,
    bytes_per_s: float,
    launch_s: float,
) -> Floats:
    """Seconds of products of `flops` FLOP. Their operands and results have `moved_bytes` bytes."""
    computing = np.asarray(flops, dtype=np.float64) / (peak_flops_per_s * np.asarray(part))
    return _floats(launch_s + np.maximum(computing, np.asarray(moved_bytes, dtype=np.float64) / bytes_per_s))


def attention_flops(count: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, *, is_causal: bool) -> Floats:
    """Forward FLOP of `count` heads of m queries, n keys and head size k. A causal mask halves the FLOP."""
    full = 4.0 * np.asarray(count, dtype=np.float64) * np.asarray(m) * np.asarray(n) * np.asarray(k)
    return _floats(full / 2 if is_causal else full)


def attention_seconds(
    *,
    flops: ArrayLike,
    keys: ArrayLike,
    attention: AttentionEfficiency,
    peak_flops_per_s: float,
    launch_s: float,
    is_backward: bool,
) -> Floats:
    """Seconds of a fused kernel. `flops` counts the forward pass. `keys` is the most keys that a query sees."""
    keys = np.asarray(keys, dtype=np.float64)
    part = (
        (attention.backward if is_backward else attention.forward) * keys / (keys + attention.keys_at_half(is_backward))
    )
    work = np.asarray(flops, dtype=np.float64) * (BACKWARD_PER_FORWARD if is_backward else 1.0)
    return _floats(launch_s + work / (peak_flops_per_s * part))


def memory_seconds(*, moved_bytes: ArrayLike, bytes_per_s: float, launch_s: float) -> Floats:
    """Seconds of a kernel that reads and writes `moved_bytes` in all."""
    return _floats(launch_s + np.asarray(moved_bytes, dtype=np.float64) / bytes_per_s)


def collective_seconds(
    *, sent_bytes: ArrayLike, hops: ArrayLike, bytes_per_s: float, latency_s: float, call: CallCost
) -> Floats:
    """Seconds of one collective in which a rank sends `sent_bytes` over `hops` steps of a link."""
    moving = np.asarray(sent_bytes, dtype=np.float64) / (bytes_per_s * call.efficiency)
    return _floats(call.call_s + np.asarray(hops, dtype=np.float64) * latency_s + moving)


def _floats(value: Any) -> Floats:
    return np.asarray(value, dtype=np.float64)
