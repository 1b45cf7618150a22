"""Elements picked, added or replaced by index tensors. Indexed dimensions are whole; the index may be split."""

from typing import Any

import torch

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import aligned, dim_index, dims, in_order, rule_from, slot_of
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
    return rule_from(call, in_order(call, specs), output, whole={f"d{d}"}, linear=[{x}])


@rule(aten.index.Tensor)
def index(call: Call) -> Rule:
    """Indexed dimensions are whole, those of indices parallel: in the place of adjacent indexed ones, else in front."""
    x = slot_of(call.args[0])
    shape = call.operands[x].shape
    indices: list[Any] = list(call.args[1])
    places = [d for d, i in enumerate(indices) if isinstance(i, Slot)]
    given = [slot_of(indices[d]) for d in places]
    if not given or any(call.operands[k].dtype.is_floating_point for k in given):
        raise RuleError("index without index tensors")
    if any(str(call.operands[k].dtype) in ("torch.bool", "torch.uint8") for k in given):
        raise RuleError("index by a mask")
    rank = max(len(call.operands[k].shape) for k in given)
    block: list[Dim] = [(f"i{n}",) for n in range(rank)]
    spec = dims(shape)
    adjacent = places == list(range(places[0], places[-1] + 1))
    rest = [dim for d, dim in enumerate(spec) if d not in places]
    at = places[0] if adjacent else 0
    specs = {x: spec} | {k: block[rank - len(call.operands[k].shape) :] for k in given}
    output = [*rest[:at], *block, *rest[at:]]
    return rule_from(call, in_order(call, specs), output, whole={f"d{d}" for d in places}, linear=[{x}])


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
    return rule_from(call, in_order(call, specs), output, whole=whole, linear=[{x}])


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
    return rule_from(call, in_order(call, specs), spec, whole=whole, additive=additive, linear=[{x, source}])


def _scattered(call: Call, source: int | None) -> tuple[list[Any], list[Dim], set[str], int]:
    """Specs in operand order, output, whole factors and the slot of self; index and source must fit self elsewhere."""
    x, index = slot_of(call.args[0]), slot_of(call.args[2])
    shape, picked = call.operands[x].shape, call.operands[index].shape
    d = dim_index(call.args[1], len(shape))
    same = len(shape) == len(picked) and all(
        a == b for n, (a, b) in enumerate(zip(shape, picked, strict=True)) if n != d
    )
    if not shape or not same or (source is not None and call.operands[source].shape != picked):
        raise RuleError("scatter of an index that is smaller than the tensor")
    spec = dims(shape)
    specs = {x: spec, index: [*spec[:d], ("i",), *spec[d + 1 :]]}
    if source is not None:
        specs[source] = specs[index]
    return in_order(call, specs), spec, {f"d{d}"}, x


@rule(aten.scatter_add.default)
def scatter_add(call: Call) -> Rule:
    """As `index_add`."""
    source = slot_of(call.args[3])
    specs, output, whole, x = _scattered(call, source)
    return rule_from(call, specs, output, whole=whole, additive={x}, linear=[{x, source}])


@rule(aten.scatter.src)
def scatter(call: Call) -> Rule:
    """No single rank knows which elements are replaced, so the index is whole too."""
    source = slot_of(call.args[3])
    specs, output, whole, x = _scattered(call, source)
    return rule_from(call, specs, output, whole=whole | {"i"}, linear=[{x, source}])


@rule(aten.scatter.value)
def scatter_value(call: Call) -> Rule:
    specs, output, whole, x = _scattered(call, None)
    zero = isinstance(call.args[3], (int, float)) and call.args[3] == 0
    return rule_from(call, specs, output, whole=whole | {"i"}, linear=[{x}] if zero else [])


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def slice_scatter(call: Call) -> Rule:
    """A slice is replaced: its dimension is whole."""
    x, source = slot_of(call.args[0]), slot_of(call.args[1])
    keeps_dim = call.target is aten.slice_scatter.default
    spec = dims(call.operands[x].shape)
    d = dim_index(call.arg(2, "dim", 0), len(spec))
    part: list[Dim] = [*spec[:d], *([("part",)] if keeps_dim else []), *spec[d + 1 :]]
    specs = {x: spec, source: part}
    return rule_from(call, in_order(call, specs), spec, whole={f"d{d}", "part"}, linear=[{x, source}])


@rule(aten.index_put.default)
def index_put(call: Call) -> Rule:
    """Indexed dimensions and indices are whole, the rest is parallel: no rank knows which elements are replaced."""
    x, values = slot_of(call.args[0]), slot_of(call.args[2])
    places = [d for d, i in enumerate(call.args[1]) if isinstance(i, Slot)]
    given = [slot_of(call.args[1][d]) for d in places]
    if any(call.operands[k].dtype is not torch.int64 for k in given) or places != list(
        range(places[0], places[-1] + 1)
    ):
        raise RuleError("index_put by a mask, or with indices that are not adjacent")
    rank = max(len(call.operands[k].shape) for k in given)
    spec = dims(call.operands[x].shape)
    block: list[Dim] = [(f"i{n}",) for n in range(rank)]
    region = [*spec[: places[0]], *block, *spec[places[-1] + 1 :]]
    specs = {x: spec, values: aligned(region, call.operands[values].shape)}
    specs |= {k: aligned(block, call.operands[k].shape) for k in given}
    whole = {f"d{d}" for d in places} | {f for dim in block for f in dim}
    return rule_from(call, in_order(call, specs), spec, whole=whole, linear=[{x, values}])


@rule(aten.scatter_reduce.two)
def scatter_reduce(call: Call) -> Rule:
    """No single rank knows all elements that meet in a place."""
    specs, output, whole, _ = _scattered(call, slot_of(call.args[3]))
    return rule_from(call, specs, output, whole=whole | {"i"})


@rule(aten.index_fill.int_Scalar)
def index_fill(call: Call) -> Rule:
    x, index = slot_of(call.args[0]), slot_of(call.args[2])
    spec = dims(call.operands[x].shape)
    d = dim_index(call.args[1], len(spec))
    specs: dict[int, list[Dim]] = {x: spec, index: [("i",)] * len(call.operands[index].shape)}
    return rule_from(call, in_order(call, specs), spec, whole={f"d{d}", "i"})


@rule(aten.take_along_dim.default)
def take_along_dim(call: Call) -> Rule:
    """As `gather`, with dimensions that broadcast."""
    x, index = slot_of(call.args[0]), slot_of(call.args[1])
    output = dims(call.output.shape)
    d = dim_index(call.arg(2, "dim"), len(output))
    source = [(f"x{d}",) if n == d else dim for n, dim in enumerate(output)]
    return rule_from(call, in_order(call, {x: source, index: output}), output, whole={f"x{d}"}, linear=[{x}])
