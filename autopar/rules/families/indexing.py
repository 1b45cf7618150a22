"""Elements picked, added or replaced by index tensors. Indexed dimensions are whole; the index may be split."""

import torch

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import aligned, dim_index, dims, is_zero, rule_from, slot_of, slots_of
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule, Slot


@rule(aten.index_select.default)
def index_select(call: Call) -> Rule:
    """The indexed dimension is whole, the index may be split."""
    x, index = slot_of(call.args[0]), slot_of(call.args[2])
    spec = dims(call.operands[x].shape)
    d = dim_index(call.args[1], len(spec))
    output = [*spec[:d], ("i",), *spec[d + 1 :]]
    specs: dict[int, list[Dim]] = {x: spec, index: dims(call.operands[index].shape, "i")}
    if call.operands[index].shape:
        specs[index] = [("i",)]
    return rule_from(call, specs, output, whole={f"d{d}"}, linear=[{x}])


def _indices(call: Call) -> tuple[list[int], list[int], list[Dim]]:
    """The dimensions that are indexed, the operands that index them, and the dimensions of these together."""
    places = [d for d, index in enumerate(call.args[1]) if isinstance(index, Slot)]
    given = slots_of(call.args[1])
    rank = max((len(call.operands[k].shape) for k in given), default=0)
    return places, given, [(f"i{n}",) for n in range(rank)]


@rule(aten.index.Tensor)
def index(call: Call) -> Rule:
    """Indexed dimensions are whole, those of indices parallel: in the place of adjacent indexed ones, else in front."""
    x = slot_of(call.args[0])
    places, given, block = _indices(call)
    if not given or any(call.operands[k].dtype.is_floating_point for k in given):
        raise RuleError("index without index tensors")
    if any(str(call.operands[k].dtype) in ("torch.bool", "torch.uint8") for k in given):
        raise RuleError("index by a mask")
    spec = dims(call.operands[x].shape)
    adjacent = places == list(range(places[0], places[-1] + 1))
    rest = [dim for d, dim in enumerate(spec) if d not in places]
    at = places[0] if adjacent else 0
    specs = {x: spec} | {k: aligned(block, call.operands[k].shape) for k in given}
    output = [*rest[:at], *block, *rest[at:]]
    return rule_from(call, specs, output, whole={f"d{d}" for d in places}, linear=[{x}])


@rule(aten.gather.default)
def gather(call: Call) -> Rule:
    """Dimensions that index and operand share in full are parallel; the gathered one is so in the index only."""
    x, index = slot_of(call.args[0]), slot_of(call.args[2])
    shape, picked = call.operands[x].shape, call.operands[index].shape
    if len(shape) != len(picked):
        raise RuleError("gather of a scalar")
    d = dim_index(call.args[1], len(shape))
    output = dims(picked)
    spec = [dim if n != d and shape[n] == picked[n] else (f"x{n}",) for n, dim in enumerate(output)]
    whole = {f for n, dim in enumerate(spec) if dim == (f"x{n}",) for f in dim}
    whole |= {f"d{n}" for n in range(len(shape)) if n != d and shape[n] != picked[n]}
    specs = {x: spec, index: output}
    return rule_from(call, specs, output, whole=whole, linear=[{x}])


@rule(aten.index_add.default, aten.index_copy.default)
def index_add(call: Call) -> Rule:
    """Added rows may be split: each rank adds its own, so `self` is additive. Copied rows are whole."""
    x, index, source = slot_of(call.args[0]), slot_of(call.args[2]), slot_of(call.args[3])
    spec, adds = dims(call.operands[x].shape), call.target is aten.index_add.default
    d = dim_index(call.args[1], len(spec))
    if not spec or len(call.operands[index].shape) != 1 or len(call.operands[source].shape) != len(spec):
        raise RuleError("index_add or index_copy of scalars")
    specs: dict[int, list[Dim]] = {x: spec, index: [("i",)], source: [*spec[:d], ("i",), *spec[d + 1 :]]}
    whole, additive = ({f"d{d}"}, {x}) if adds else ({f"d{d}", "i"}, set[int]())
    return rule_from(call, specs, spec, whole=whole, additive=additive, linear=[{x, source}])


@rule(aten.scatter_add.default, aten.scatter.src, aten.scatter.value, aten.scatter_reduce.two)
def scatter(call: Call) -> Rule:
    """As `index_add`, or the index is whole too: no single rank knows which elements are replaced or meet in a place.

    Index and source must fit self elsewhere.
    """
    x, index, source = slot_of(call.args[0]), slot_of(call.args[2]), call.args[3]
    shape, picked = call.operands[x].shape, call.operands[index].shape
    d = dim_index(call.args[1], len(shape))
    same = len(shape) == len(picked) and all(
        a == b for n, (a, b) in enumerate(zip(shape, picked, strict=True)) if n != d
    )
    values = slots_of([source])
    if not shape or not same or any(call.operands[k].shape != picked for k in values):
        raise RuleError("scatter of an index that is smaller than the tensor")
    spec = dims(shape)
    specs = {x: spec} | {k: [*spec[:d], ("i",), *spec[d + 1 :]] for k in (index, *values)}
    whole, additive = ({f"d{d}"}, {x}) if call.target is aten.scatter_add.default else ({f"d{d}", "i"}, set[int]())
    is_linear = call.target is not aten.scatter_reduce.two and (values or is_zero(source))
    return rule_from(call, specs, spec, whole=whole, additive=additive, linear=[{x, *values}] if is_linear else [])


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def slice_scatter(call: Call) -> Rule:
    """A slice is replaced: its dimension is whole."""
    x, source = slot_of(call.args[0]), slot_of(call.args[1])
    keeps_dim = call.target is aten.slice_scatter.default
    spec = dims(call.operands[x].shape)
    d = dim_index(call.named("dim", 0), len(spec))
    part: list[Dim] = [*spec[:d], *([("part",)] if keeps_dim else []), *spec[d + 1 :]]
    specs = {x: spec, source: part}
    return rule_from(call, specs, spec, whole={f"d{d}", "part"}, linear=[{x, source}])


@rule(aten.index_put.default)
def index_put(call: Call) -> Rule:
    """Indexed dimensions and indices are whole, the rest is parallel: no rank knows which elements are replaced."""
    x, values = slot_of(call.args[0]), slot_of(call.args[2])
    places, given, block = _indices(call)
    if any(call.operands[k].dtype is not torch.int64 for k in given) or places != list(
        range(places[0], places[-1] + 1)
    ):
        raise RuleError("index_put by a mask, or with indices that are not adjacent")
    spec = dims(call.operands[x].shape)
    region = [*spec[: places[0]], *block, *spec[places[-1] + 1 :]]
    specs = {x: spec, values: aligned(region, call.operands[values].shape)}
    specs |= {k: aligned(block, call.operands[k].shape) for k in given}
    whole = {f"d{d}" for d in places} | {f for dim in block for f in dim}
    return rule_from(call, specs, spec, whole=whole, linear=[{x, values}])


@rule(aten.index_fill.int_Scalar)
def index_fill(call: Call) -> Rule:
    x, index = slot_of(call.args[0]), slot_of(call.args[2])
    spec = dims(call.operands[x].shape)
    d = dim_index(call.args[1], len(spec))
    specs: dict[int, list[Dim]] = {x: spec, index: [("i",)] * len(call.operands[index].shape)}
    return rule_from(call, specs, spec, whole={f"d{d}", "i"})


@rule(aten.take_along_dim.default)
def take_along_dim(call: Call) -> Rule:
    """As `gather`, with dimensions that broadcast."""
    x, index = slot_of(call.args[0]), slot_of(call.args[1])
    output = dims(call.output.shape)
    d = dim_index(call.named("dim"), len(output))
    source = [(f"x{d}",) if n == d else dim for n, dim in enumerate(output)]
    return rule_from(call, {x: source, index: output}, output, whole={f"x{d}"}, linear=[{x}])
