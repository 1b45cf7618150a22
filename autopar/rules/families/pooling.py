"""Pooling and resizing: batch and channels are parallel, places are whole."""

from autopar._torch.operators import aten
from autopar.rules.families._notation import dim_indices, dims, rule_from, slot_of
from autopar.rules.operators import output_of
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule


def _places(call: Call, places: list[int], linear: bool) -> Rule:
    """Dimensions in `places` are whole and may change in size; the others are parallel."""
    shape = call.operands[slot_of(call.args[0])].shape
    spec, output = dims(shape), dims(shape)
    for d in places:
        spec[d], output[d] = (f"x{d}",), (f"y{d}",)
    whole = {f for side in (spec, output) for dim in side for f in dim if f[0] in "xy"}
    return rule_from(call, [spec], output, whole=whole, linear=[{0}] if linear else [])


def _last(call: Call, count: int, linear: bool) -> Rule:
    rank = len(call.operands[slot_of(call.args[0])].shape)
    return _places(call, list(range(rank - count, rank)), linear)


@rule(aten.max_pool1d.default, output_of(aten.adaptive_max_pool1d.default, 0))
def max_pool1d(call: Call) -> Rule:
    return _last(call, 1, False)


@rule(aten.max_pool2d.default, output_of(aten.adaptive_max_pool2d.default, 0))
def max_pool2d(call: Call) -> Rule:
    return _last(call, 2, False)


@rule(aten.max_pool3d.default)
def max_pool3d(call: Call) -> Rule:
    return _last(call, 3, False)


@rule(aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default, aten.upsample_nearest1d.vec)
def avg_pool1d(call: Call) -> Rule:
    return _last(call, 1, True)


@rule(aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.upsample_nearest2d.vec)
@rule(aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec)
def avg_pool2d(call: Call) -> Rule:
    return _last(call, 2, True)


@rule(aten.avg_pool3d.default, aten.adaptive_avg_pool3d.default)
def avg_pool3d(call: Call) -> Rule:
    return _last(call, 3, True)


@rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(call: Call) -> Rule:
    return _last(call, 3, True)


@rule(aten.unfold.default)
def unfold(call: Call) -> Rule:
    """Windows over one dimension, their elements in a new last one; both are whole."""
    spec = dims(call.operands[0].shape)
    (d,) = dim_indices(call.args[1], len(spec))
    output: list[Dim] = [*spec[:d], ("windows",), *spec[d + 1 :], ("window",)]
    return rule_from(call, [spec], output, whole={f"d{d}", "windows", "window"}, linear=[{0}])


@rule(aten.pad.default)
def pad(call: Call) -> Rule:
    """Padding by other than a constant: padded dimensions are whole."""
    rank, pads = len(call.operands[0].shape), call.args[1]
    padded = [rank - 1 - n for n in range(len(pads) // 2) if pads[2 * n] or pads[2 * n + 1]]
    return _places(call, padded, call.arg(2, "mode", "constant") != "constant")
