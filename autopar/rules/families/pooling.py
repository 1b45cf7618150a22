"""Pooling, resizing, patches and sampling by a grid: batch and channels are parallel, places are whole."""

from math import prod
from typing import Any

from autopar._torch.operators import aten
from autopar.rules.families._notation import dim_indices, dims, is_zero, places_whole, rule_from, slot_of
from autopar.rules.operators import output_of
from autopar.rules.registry import Pattern, rule
from autopar.rules.rule import Call, Dim, Rule, Step


def _register(count: int, *targets: Any, linear: bool = False) -> None:
    """The last `count` dimensions are places."""

    def last(call: Call) -> Rule:
        rank = len(call.operands[slot_of(call.args[0])].shape)
        return places_whole(call, list(range(rank - count, rank)), linear)

    rule(*targets)(last)


_MEANS = ("avg_pool{}d", "adaptive_avg_pool{}d")
_NEAREST = ("upsample_nearest{}d", "_upsample_nearest_exact{}d")
_LARGEST = ("max_pool{}d_with_indices", "adaptive_max_pool{}d")  # an index counts the places of its own channel
_OTHERS = ("max_pool{}d", "reflection_pad{}d", "replication_pad{}d")


def _packets(names: tuple[str, ...], count: int) -> list[Any]:
    return [getattr(aten, name.format(count)) for name in names]


for _count in (1, 2, 3):
    _register(_count, *(packet.default for packet in _packets(_MEANS + _NEAREST, _count)), linear=True)
    _register(_count, *(packet.vec for packet in _packets(_NEAREST, _count)), linear=True)
    _register(_count, *(output_of(packet.default, k) for packet in _packets(_LARGEST, _count) for k in (0, 1)))
    _register(_count, *(packet.default for packet in _packets(_OTHERS, _count)))
for _count, _packet in (
    (1, aten.upsample_linear1d),
    (2, aten.upsample_bilinear2d),
    (2, aten.upsample_bicubic2d),
    (2, aten._upsample_bilinear2d_aa),
    (2, aten._upsample_bicubic2d_aa),
    (3, aten.upsample_trilinear3d),
):
    _register(_count, _packet.default, _packet.vec, linear=True)
_register(3, aten.channel_shuffle.default, linear=True)

rule(aten.max_unpool2d.default)(Pattern("... h w, ... h w -> ... y x", whole="h w y x", linear=((0,),)))
rule(aten.max_unpool3d.default)(Pattern("... t h w, ... t h w -> ... z y x", whole="t h w z y x", linear=((0,),)))
rule(aten.im2col.default)(Pattern("... c h w -> ... (c k) l", whole="h w k l", linear=((0,),)))


@rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(call: Call) -> Rule:
    """``"... (c p q) h w -> ... c (h p) (w q)"``, and its inverse."""
    shuffles = call.target is aten.pixel_shuffle.default
    shapes = call.operands[0].shape, call.output.shape
    coarse, fine = shapes if shuffles else shapes[::-1]
    batch, factor = dims(fine[:-3], "b"), call.args[1]
    sizes = {"c": fine[-3], "h": coarse[-2], "w": coarse[-1], "p": factor, "q": factor}
    inner: list[Dim] = [*batch, ("c", "p", "q"), ("h",), ("w",)]
    outer: list[Dim] = [*batch, ("c",), ("h", "p"), ("w", "q")]
    source, target = (inner, outer) if shuffles else (outer, inner)
    return rule_from(call, [source], target, sizes=sizes, whole={"p", "q"}, linear=[{0}])


@rule(aten.col2im.default)
def col2im(call: Call) -> Rule:
    """``"... (c k) l -> ... c h w"``: overlapping patches are added, within their channel."""
    batch = dims(call.output.shape[:-3], "b")
    patch = prod(call.args[2])
    sizes = {"c": call.output.shape[-3], "k": patch}
    source: list[Dim] = [*batch, ("c", "k"), ("l",)]
    output: list[Dim] = [*batch, ("c",), ("h",), ("w",)]
    return rule_from(call, [source], output, sizes=sizes, whole={"k", "l", "h", "w"}, linear=[{0}])


@rule(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(call: Call) -> Rule:
    """``"n c h w, n y x p -> n c y x"``: every point of the grid reads the whole image of its sample."""
    count = len(call.output.shape) - 2
    read: list[Dim] = [(f"x{d}",) for d in range(count)]
    points: list[Dim] = [(f"y{d}",) for d in range(count)]
    inputs: list[list[Dim]] = [[("n",), ("c",), *read], [("n",), *points, ("p",)]]
    whole = {"p", *(f for dim in read for f in dim)}
    return rule_from(call, inputs, [("n",), ("c",), *points], whole=whole, linear=[{0}])


@rule(aten.affine_grid_generator.default)
def affine_grid(call: Call) -> Rule:
    """``"n p q -> n y x p"``. The size has the local batch."""

    def emit(local: Call) -> tuple[Step, ...]:
        size = [local.output.shape[0], *local.args[1][1:]]
        return (Step(local.target, (local.args[0], size, *local.args[2:])),)

    points: list[Dim] = [(f"y{d}",) for d in range(len(call.output.shape) - 2)]
    whole = {"p", "q", *(f for dim in points for f in dim)}
    inputs: list[list[Dim]] = [[("n",), ("p",), ("q",)]]
    return rule_from(call, inputs, [("n",), *points, ("p",)], whole=whole, linear=[{0}], emit=emit)


@rule(aten.unfold.default)
def unfold(call: Call) -> Rule:
    """Windows over one dimension, their elements in a new last one; both are whole."""
    spec = dims(call.operands[0].shape)
    (d,) = dim_indices(call.args[1], len(spec))
    output: list[Dim] = [*spec[:d], ("windows",), *spec[d + 1 :], ("window",)]
    return rule_from(call, [spec], output, whole={f"d{d}", "windows", "window"}, linear=[{0}])


@rule(aten.constant_pad_nd.default, aten.pad.default)
def pad(call: Call) -> Rule:
    """Padded dimensions are whole. Padding with 0, or by other than a constant, is linear."""
    rank, pads = len(call.operands[0].shape), call.args[1]
    padded = [rank - 1 - n for n in range(len(pads) // 2) if pads[2 * n] or pads[2 * n + 1]]
    if call.target is aten.pad.default:
        return places_whole(call, padded, call.named("mode", "constant") != "constant")
    return places_whole(call, padded, is_zero(call.named("value", 0)))
