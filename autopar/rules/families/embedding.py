"""Look-ups: tables by ids, and elements by index tensors."""

from typing import Any

from autopar.errors import RuleError
from autopar.rules.families._notation import aten, dim_index, dims, in_order, original, rule_from, slot_of
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Local, MeshDimRef, Rule, Slot, Step


def _emit_embedding(call: Call, local: Local) -> tuple[Step, ...]:
    """With rows split, each rank looks up its own ids and yields zeros for the others."""
    mesh_dims = local.mesh_dims("v")
    if not mesh_dims:
        return (original(call),)
    (name,) = mesh_dims
    padding = call.arg(2, "padding_idx", -1)
    return (Step("vocab_parallel_embedding", (call.args[0], call.args[1], padding, MeshDimRef(name))),)


@rule(aten.embedding.default)
def embedding(call: Call) -> Rule:
    """``"v d, ... -> ... d"``: v by rewrite, only as its outermost axis because ids are compared with an offset."""
    weight, ids = slot_of(call.args[0]), slot_of(call.args[1])
    batch = dims(call.operands[ids].shape, "b")
    counted = bool(call.arg(3, "scale_grad_by_freq", False)) or bool(call.arg(4, "sparse", False))
    whole = {"v", *(f for dim in batch for f in dim)} if counted else set()
    specs: dict[int, list[Dim]] = {weight: [("v",), ("d",)], ids: batch}
    return rule_from(
        call,
        in_order(call, specs),
        [*batch, ("d",)],
        whole=whole,
        linear=[{weight}],
        outermost={"v"},
        emit=_emit_embedding,
    )


@rule(aten.one_hot.default)
def one_hot(call: Call) -> Rule:
    spec = dims(call.operands[0].shape)
    if not isinstance(call.arg(1, "num_classes", -1), int) or call.arg(1, "num_classes", -1) < 0:
        raise RuleError("one_hot whose number of classes depends on data")
    return rule_from(call, [spec], [*spec, ("v",)], whole={"v"})


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
    """Indexed dimensions are whole, the dimensions of the (broadcast) indices are parallel.

    They stand where the indexed dimensions were when those are adjacent, in front otherwise.
    """
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
