"""The collectives of a block as expressions, of one micro-batch and one rank."""

from collections.abc import Iterator
from fractions import Fraction
from math import prod

from autopar.cost_model.work.block_work import Cause, Sent
from autopar.cost_model.work.conversion_steps import ConversionStep
from autopar.cost_model.work.fusion import Flow
from autopar.cost_model.work.polynomials import Polynomial, polynomial, symbol
from autopar.lowering.conversions import Collective, wire
from autopar.lowering.experts import COUNT_BYTES
from autopar.rules.variants import WIDTH_OF_SUMS, exchanges

# numbers per target that a rewrite sums over ranks: the highest logit; the sum of exponentials and the target's own
_INSIDE = {"cross_entropy_loss": (1, 2)}  # (`autopar.lowering.vocabulary`)


def sent_by(flow: Flow) -> Iterator[Sent[Polynomial]]:
    """What a rank sends for a call of a block: conversions, sums and exchanges of operators, sums of gradients."""
    mesh, naming = flow.naming.mesh, flow.naming
    for step in flow.steps:
        i, info = step.indices[0], flow.info(step.value)
        others = tuple(t for j, t in enumerate(step.before) if j not in step.indices)
        degrees = [d for j, d in enumerate(naming.degrees) if j not in step.indices]
        divisor = prod((d for t, d in zip(others, degrees, strict=True) if t.kind == "S"), start=symbol("b") ** 0)
        whole = polynomial(naming.whole(flow.dims[step.value]) / divisor * info.dtype.itemsize)
        name = mesh.names[i] if len(step.indices) == 1 else mesh.joined(i) or ""
        of: Cause = "parameter" if flow.roles.get(step.value) == "parameter" else "value"
        passes = wire(step.before[i].kind, step.target[i].kind, info.differentiable)
        if _feeds_chunks(flow, step):
            yield from _each_chunk(flow, name, whole, "all_gather", True, of)
            yield from _each_chunk(flow, name, whole, "reduce_scatter", False, of)
            yield from _each_chunk(flow, name, whole, "all_gather", False, "regather")
            continue
        for collective, is_forward in zip(passes, (True, False), strict=True):
            if collective:
                yield Sent(collective=collective, mesh_dim=name, is_forward=is_forward, whole_bytes=whole, of=of)
        if _first_to_experts(flow, step):
            counts = polynomial(COUNT_BYTES * naming.degrees[i] ** 2)
            yield Sent(collective="all_to_all", mesh_dim=name, is_forward=True, whole_bytes=counts, of="inside")
        users = {(user, k) for user, k in step.users}
        if step.is_gather and any((flow.nodes[n].meta["key"], k) in users for n, k in flow.regathered):
            yield Sent(collective="all_gather", mesh_dim=name, is_forward=False, whole_bytes=whole, of="regather")
    for name in flow.runs:
        sizes = flow.sizes[name]
        over: dict[str, list[str]] = {}
        for mesh_name, degree, variant in zip(mesh.names, mesh.degrees, sizes.chosen, strict=True):
            if variant.factor in sizes.bound.rule.invariant and degree > 1:
                over.setdefault(variant.factor, []).append(mesh_name)
        yield from _exchanged(flow, name)
        for names in over.values():  # one sum over all mesh dimensions that split the factor
            for count in _INSIDE.get(flow.operators[name], ()):
                rows = polynomial(count * sizes.elements(1) * sizes.call.operands[0].dtype.itemsize)
                if flow.chunked is not None and flow.chunked.loss == name:
                    yield from _each_chunk(flow, "_".join(names), rows, "all_reduce", True, "inside")
                    continue
                yield Sent(
                    collective="all_reduce", mesh_dim="_".join(names), is_forward=True, whole_bytes=rows, of="inside"
                )
    for port in flow.block.differentiable_ports:
        if flow.roles[port] != "parameter":
            continue
        for j, kind in enumerate(flow.types(port)):
            if kind.kind == "R" and mesh.degrees[j] > 1:
                whole = polynomial(flow.value_bytes(port))
                yield Sent(
                    collective="all_reduce", mesh_dim=mesh.names[j], is_forward=False, whole_bytes=whole, of="parameter"
                )


def _first_to_experts(flow: Flow, step: ConversionStep) -> bool:
    """Whether a step sends the experts' numbers of sorted rows, before which ranks exchange the counts of rows."""
    i = step.indices[0]
    is_there = not step.before[i].by_expert and step.target[i].by_expert and step.before[i].kind == "S"
    return is_there and not flow.info(step.value).dtype.is_floating_point


def _exchanged(flow: Flow, name: str) -> Iterator[Sent[Polynomial]]:
    """What the rewrite of an operator sends to one other rank."""
    sizes, mesh, naming = flow.sizes[name], flow.naming.mesh, flow.naming
    for i, variant in enumerate(sizes.chosen):
        degree = naming.degrees[i]
        for message in exchanges(sizes.bound.rule, variant) if mesh.degrees[i] > 1 else ():
            least = WIDTH_OF_SUMS if message.sums else 0
            parts = (sizes.elements(k) * max(sizes.infos[k].dtype.itemsize, least) for k in message.operands)
            whole = sum(parts, start=symbol("b") * 0) * degree / (2 if message.is_half else 1)
            yield Sent(
                collective=message.collective,
                mesh_dim=mesh.names[i],
                is_forward=message.is_forward,
                whole_bytes=polynomial(whole),
                of="beside" if message.is_beside else "inside",
                times=polynomial(message.per_rank * degree + message.more) if message.per_rank else None,
            )


def _feeds_chunks(flow: Flow, step: ConversionStep) -> bool:
    """Whether a gather is of hidden states that only the loss in chunks reads. Then each chunk is gathered."""
    if flow.chunked is None or not step.is_gather or len(step.indices) > 1:
        return False
    key = flow.nodes[flow.chunked.linear].meta["key"]
    shard, dims, degrees = step.before[step.indices[0]], flow.dims[step.value], flow.naming.mesh.degrees
    return set(step.users) == {(key, 0)} and dims.is_outermost(shard, step.before, degrees)


def _each_chunk(
    flow: Flow, mesh_dim: str, whole: Polynomial, collective: Collective, is_forward: bool, of: Cause
) -> Iterator[Sent[Polynomial]]:
    """A collective of every chunk."""
    part = whole.times(Fraction(1, flow.loss_chunks))
    for _ in range(flow.loss_chunks):
        yield Sent(collective=collective, mesh_dim=mesh_dim, is_forward=is_forward, whole_bytes=part, of=of)
