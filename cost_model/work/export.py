"""The cost of every distinct block of a captured program on one rank, as expressions (`work.block_work`).

An operator's FLOP come from its rule: symbols stand for the sizes of factors, divided by the degrees that split them
(`_product`). Kernels, their bytes and the saved tensors come from torch's autograd
(`autopar.cost_model.work.autograd_probe`). Collectives come from the labelling's conversions, which the runtime runs
too (`autopar.cost_model.work.conversion_steps`). Padding of uneven shards is left out. If the keys of attention are the
sequence, their number is the symbol S. Context parallelism that is not labelled makes S larger than s.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

from autopar.capture.analysis import Analysis
from autopar.capture.nodes import argument
from autopar.cost_model.work.autograd_probe import NodeRun, run_block
from autopar.cost_model.work.block_work import BlockWork, Operator, memory_operator
from autopar.cost_model.work.conversion_steps import conversion_steps
from autopar.cost_model.work.fusion import Flow, Need, needs_of_product
from autopar.cost_model.work.operator_cost import EXPERT_ORDER, EXPERT_PRODUCTS, forward_flops, target_name
from autopar.cost_model.work.polynomials import Expr, Polynomial, polynomial, symbol
from autopar.cost_model.work.recomputable import recomputable, selected
from autopar.cost_model.work.sent import sent_by
from autopar.cost_model.work.sizes import Naming, sizes_of
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.ir.stages import ancestors, needed_results
from autopar.lowering.loss_region import region_of_block

SymbolicWork = BlockWork[Polynomial]


def block_works(
    program: Program,
    analysis: Analysis,
    labels: Sequence[BlockLabels],
    mesh: Mesh,
    *,
    by_size: Mapping[int, Expr] | None = None,
    runs: Sequence[Mapping[str, NodeRun]] | None = None,
    regather: bool = True,
    loss_chunks: int = 1,
) -> tuple[SymbolicWork, ...]:
    """The work of every distinct block, in their order. The degree of each mesh dimension is a symbol (t for `tp`)."""
    runs = block_runs(program, analysis) if runs is None else runs
    naming = Naming(analysis, mesh, by_size or {})
    flows = (flow_of(program, i, labels[i], naming, runs[i], regather) for i in range(len(program.blocks)))
    return tuple(work_of(replace(flow, loss_chunks=loss_chunks)) for flow in flows)


def block_runs(program: Program, analysis: Analysis) -> tuple[Mapping[str, NodeRun], ...]:
    """The operators of every distinct block as torch's autograd runs them, equal under all labels."""
    return tuple(run_block(block, i, analysis) for i, block in enumerate(program.blocks))


def flow_of(
    program: Program, index: int, labels: BlockLabels, naming: Naming, runs: Mapping[str, NodeRun], regather: bool
) -> Flow:
    """A block under its labels, as torch's autograd runs it, without operators that only unused outputs need."""
    block, analysis = program.blocks[index], naming.analysis
    outputs = tuple(needed_results(program)[index])
    needed = {node.name for node in ancestors(block, outputs)}
    names = {node.meta["key"]: node.name for node in block.operators}
    nodes = {node.name: node for node in block.graph.nodes if "info" in node.meta}
    steps = []
    for step in conversion_steps(block, analysis, index, labels, naming.mesh):
        users = tuple((u, k) for u, k in step.users if (names[u] in needed if k >= 0 else step.value in outputs))
        if users:
            steps.append(replace(step, users=users))
    regathered = {
        (names[user], k): step.before
        for step in steps
        if regather and step.is_gather and all(_is_linear(nodes, names.get(user), k) for user, k in step.users)
        for user, k in step.users
    }
    sizes = sizes_of(block, index, labels, naming)
    region = region_of_block(analysis, block, index, labels, naming.mesh, outputs)
    return Flow(
        block=block,
        dims=analysis.dims[index],
        naming=naming,
        sizes=sizes,
        runs={name: run for name, run in runs.items() if name in needed},
        operands=analysis.operands[index],
        labels=labels,
        steps=tuple(steps),
        outputs=outputs,
        regathered=regathered,
        nodes=nodes,
        region=None if isinstance(region, str) else region,
    )


def _is_linear(nodes: Mapping[str, object], name: str | None, operand: int) -> bool:
    """Whether a use is the input of `linear`. Gathers with only such uses are repeated (`lowering.gather_linear`)."""
    return name is not None and operand == 0 and target_name(getattr(nodes[name], "target", "")) == "linear"


def work_of(flow: Flow) -> SymbolicWork:
    """The work of a block, under the block's name."""
    # a product with a size of zero, such as a pruned layer's, computes nothing
    names = [n for n in flow.runs if flow.is_product(n) and 0 not in flow.sizes[n].factors().values()]
    pairs = zip(flow.groups, flow.needs_of_groups, strict=True)
    products, eager = tuple(op for name in names for op in _products(flow, name)), tuple(_eager(flow))
    return BlockWork(
        role=flow.block.name,
        products=products,
        eager=eager,
        fused=tuple(_fused(flow, members, flow.written, needs) for members, needs in pairs),
        input_bytes=polynomial(_sum(flow.value_bytes(p) for p in (*_inputs(flow), *_choices(flow)))),
        **_parameters(flow),
        **_saved_fields(flow, flow.needs_of_groups),
        sent=tuple(sent_by(flow)),
        selected=selected(recomputable(flow, (*products, *eager)), keys) if (keys := flow.labels.recomputed) else None,
    )


def kept_work(flow: Flow, work: SymbolicWork) -> SymbolicWork:
    """The work of a block that keeps its gathered values, from its work if it gathers them again."""
    kept, operators = replace(flow, regathered={}), (*work.products, *work.eager)
    return replace(
        work,
        sent=tuple(sent_by(kept)),
        selected=selected(recomputable(kept, operators), keys) if (keys := flow.labels.recomputed) else None,
        **_saved_fields(kept, flow.needs_of_groups),
    )


def _saved_fields(flow: Flow, needs_of_groups: Sequence[set[Need]]) -> dict[str, Any]:
    """The fields of the tensors that the backward pass of a block needs."""
    of_groups = set[Need]().union(*needs_of_groups)
    needs = {name: set(needs_of_product(flow, name)) for name in flow.runs if flow.is_product(name)}
    of_attention = [needs[name] for name in needs if flow.is_attention(name)]
    of_products = set[Need]().union(*needs.values())
    only_products = of_products.difference(of_groups, *of_attention)  # they may be as narrow as products
    return {
        "saved_eager_bytes": polynomial(_saved_eager(flow)),
        "saved_fused_bytes": polynomial(_saved(flow, of_products | of_groups)),
        "saved_operand_bytes": polynomial(_saved(flow, only_products)),
    }


def _sum(terms: Iterable[Expr]) -> Expr:
    """The sum of expressions. sympy adds many at once faster than one after another."""
    import sympy

    return sympy.Add(*terms)


def _inputs(flow: Flow) -> list[str]:
    return [p for p in flow.block.differentiable_ports if flow.roles[p] == "value"]


def _choices(flow: Flow) -> list[str]:
    """The experts that tokens choose, which a recomputed block keeps if ranks split experts."""
    if not flow.naming.mesh.owning("experts"):
        return []
    return [flow.operands[name][0] for name in flow.runs if flow.operators[name] == EXPERT_ORDER]


def _need_bytes(flow: Flow, need: Need) -> Expr:
    if need.inside >= 0:
        return flow.sizes[need.value].piece_bytes(flow.runs[need.value].kept[need.inside].piece)
    whole = flow.naming.whole(flow.dims[need.value])
    return whole / need.divisor * flow.info(need.value).dtype.itemsize


def _saved(flow: Flow, needs: Iterable[Need]) -> Expr:
    """Bytes of the tensors that backward passes need."""
    return _sum(_need_bytes(flow, need) for need in needs if not _is_in_chunks(flow, need.value))


def _is_in_chunks(flow: Flow, value: str) -> bool:
    """Whether a value exists in chunks only, or is kept by the loss that runs in chunks."""
    return flow.chunked is not None and value in {*flow.chunked.inside, flow.chunked.loss}


def _saved_eager(flow: Flow) -> Expr:
    """Bytes of the distinct storages that autograd saves. Parameters, constants and ids are not counted."""
    pieces: dict[tuple[object, ...], Expr] = {}
    for name, run in flow.runs.items():
        for position, kept in enumerate(run.kept):
            if _is_in_chunks(flow, name if kept.value is None else kept.value):
                continue
            if kept.value is None:
                pieces[name, position] = flow.sizes[name].piece_bytes(kept.piece)
            elif not flow.is_given(kept.value):
                types = flow.types(name) if kept.operand < 0 else flow.kept_types((name, kept.operand))
                divisor = flow.naming.divisor(types)
                whole = flow.naming.whole(flow.dims[kept.value])
                pieces[kept.value, divisor] = whole / divisor * flow.info(kept.value).dtype.itemsize
    return _sum(pieces.values())


def _products(flow: Flow, name: str) -> Iterator[Operator[Polynomial]]:
    """The work of a product. In chunks it has fewer rows, runs more often, and backward computes its result again."""
    whole, chunked = _product(flow, name), flow.chunked
    if chunked is None or name != chunked.linear:
        yield whole
        return
    chunks = Fraction(flow.loss_chunks)
    part = replace(whole, m=whole.m.times(1 / chunks), count=whole.count.times(chunks))
    yield part
    yield replace(part, kind="again")


def _product(flow: Flow, name: str) -> Operator[Polynomial]:
    """The work of a product."""
    sizes, run = flow.sizes[name], flow.runs[name]
    rule, factors = sizes.bound.rule, sizes.factors()
    if flow.is_attention(name):
        factors = {f: flow.naming.of_keys(n) if f == "k" else n for f, n in factors.items()}
    flops = forward_flops(rule, sizes.call, factors)
    spec = [{f for dim in dims for f in dim} for k, dims in enumerate(rule.inputs) if k not in rule.additive]
    left, right = (spec[0], spec[1]) if len(spec) > 1 else (spec[0], set())
    out = {f for dim in rule.output for f in dim}
    if flow.is_attention(name):
        parts = {"m": {"q"}, "n": {"k"}, "count": {f for f in left if f not in ("q", "e")}}
    else:
        parts = {
            "m": (left & out) - right,
            "n": (right & out) - left,
            "count": (left & right & out) | right - left - out,
        }
        parts["m"] |= out - left - right
    m, n, count = (
        prod((factors[f] for f in sorted(parts[which]) if f in factors), start=symbol("b") ** 0)
        for which in ("m", "n", "count")
    )
    if flow.operators[name] in EXPERT_PRODUCTS:
        m = m / count  # rows of one expert if all have as many
    attention = 2 if flow.is_attention(name) else 1
    factors_of = [k for k in range(len(rule.inputs)) if k not in rule.additive][:2]
    flows = [sizes.call.operands[k].differentiable and sizes.call.output.differentiable for k in factors_of]
    forward, backward = _attention_bytes(flow, name) if flow.is_attention(name) else _product_bytes(flow, name)
    return Operator(
        name=name,
        kind="attention" if flow.is_attention(name) else "matmul",
        flops=polynomial(flops),
        m=polynomial(m),
        n=polynomial(n),
        k=polynomial(flops / (2 * attention * count * m * n)),
        count=polynomial(count),
        forward_bytes=polynomial(forward),
        backward_bytes=polynomial(backward),
        kernels_forward=max(1, len(run.forward)),
        kernels_backward=len(run.backward),
        sees="all" if flow.is_attention(name) and _is_bidirectional(flow.nodes[name]) else None,
        only=None if all(flows) else "left" if flows[0] else "right" if any(flows) else "none",
    )


def _is_bidirectional(node: Any) -> bool:
    """Whether attention has no mask, so that every query meets every key."""
    mask, causal = (argument(node, name) for name in ("attn_mask", "is_causal"))
    return mask is None and not causal


def _product_bytes(flow: Flow, name: str) -> tuple[Expr, Expr]:
    """Forward: operands and output once. Backward, per gradient: it, the output's gradient, the other operands."""
    sizes = flow.sizes[name]
    operands = [sizes.num_bytes(k) for k in range(len(sizes.call.operands))]
    out, additive = sizes.num_bytes(-1), sizes.bound.rule.additive
    backward: Expr = 0
    for k, info in enumerate(sizes.call.operands):
        if info.differentiable and sizes.call.output.differentiable:
            others = (n for j, n in enumerate(operands) if j != k and j not in additive and k not in additive)
            backward += out + operands[k] + _sum(others)
    return _sum(operands) + out, backward


def _attention_bytes(flow: Flow, name: str) -> tuple[Expr, Expr]:
    """Forward and backward bytes. Keys and values count their own number of heads, and S tokens."""
    sizes = flow.sizes[name]
    operands = []
    for k, operand in enumerate(flow.operands[name]):
        smallest = flow.base(operand)[1]
        whole = flow.naming.whole(flow.dims[smallest])
        has_keys = any("k" in dim for dim in sizes.bound.rule.inputs[k])
        whole = flow.naming.of_keys(whole) if has_keys else whole
        operands.append(whole / flow.naming.divisor(sizes.types(k)) * sizes.call.operands[k].dtype.itemsize)
    statistics = [k.piece for k in flow.runs[name].kept if k.value is None]
    lse = _sum(sizes.piece_bytes(piece) for piece in statistics)
    out = sizes.num_bytes(-1)
    grads = (n for n, info in zip(operands, sizes.call.operands, strict=True) if info.differentiable)
    read = _sum(operands) + out + lse
    if not sizes.call.output.differentiable:
        return read, 0
    return read, read + out + _sum(grads)


def _memory(name: str, forward: Expr, backward: Expr, kernels: tuple[int, int]) -> Operator[Polynomial]:
    return memory_operator(name, polynomial(forward), polynomial(backward), kernels, Polynomial())


def _eager(flow: Flow) -> Iterator[Operator[Polynomial]]:
    """Every operator that launches a kernel of its own, and the gradient sums of values with several readers."""
    for name, run in flow.runs.items():
        if not flow.is_product(name) and (run.forward or run.backward):
            passes = [
                _sum(flow.sizes[name].piece_bytes(p) for kernel in kernels for p in kernel)
                for kernels in (run.forward, run.backward)
            ]
            yield _in_chunks(flow, (name,), _memory(name, passes[0], passes[1], (len(run.forward), len(run.backward))))
    uses: dict[str, int] = {}
    for name in flow.runs:
        if flow.info(name).differentiable:
            for operand in flow.operands[name]:
                uses[operand] = uses.get(operand, 0) + (flow.info(operand).differentiable)
    for name, count in uses.items():
        more = count - 1 + (name in flow.outputs)
        if more > 0 and flow.roles.get(name) != "parameter":
            yield _memory(f"{name} gradients", 0, 3 * more * flow.value_bytes(name), (0, more))


def _fused(flow: Flow, members: tuple[str, ...], written: frozenset[str], kept: set[Need]) -> Operator[Polynomial]:
    """One kernel each way. It moves the group's inputs, outputs and masks, and gradients of inputs and outputs."""
    inputs: dict[tuple[str, Expr], tuple[Expr, bool]] = {}
    for name in members:
        for k, operand in enumerate(flow.operands[name]):
            base, smallest = flow.base(operand)
            if base not in members:
                divisor = flow.naming.divisor(flow.use_types((name, k)))
                size = flow.naming.whole(flow.dims[smallest]) / divisor * flow.info(smallest).dtype.itemsize
                inputs[smallest, divisor] = size, flow.info(operand).differentiable
    outputs = [name for name in members if name in written]
    masks = _sum(_need_bytes(flow, need) for need in kept if need.inside >= 0)
    out = _sum(flow.value_bytes(name) for name in outputs)
    into = _sum(size for size, _ in inputs.values())
    differentiable = [name for name in outputs if flow.info(name).differentiable]
    backward: Expr = 0
    if differentiable:
        backward += _sum(flow.value_bytes(name) for name in differentiable)
        backward += _sum(_need_bytes(flow, need) for need in kept)
        backward += _sum(size for size, flows in inputs.values() if flows)
    kernels = (1, 1 if differentiable else 0)
    return _in_chunks(flow, members, _memory(" + ".join(members), into + out + masks, backward, kernels))


def _in_chunks(flow: Flow, members: Sequence[str], work: Operator[Polynomial]) -> Operator[Polynomial]:
    """A memory-bound operator or group as it runs in chunks, if it does: often, and forward again in backward."""
    chunked = flow.chunked
    if chunked is None or {*chunked.between, chunked.loss}.isdisjoint(members):
        return work
    return replace(
        work,
        backward_bytes=work.backward_bytes + work.forward_bytes,
        kernels_forward=work.kernels_forward * flow.loss_chunks,
        kernels_backward=(work.kernels_backward + work.kernels_forward) * flow.loss_chunks,
    )


def _parameters(flow: Flow) -> dict[str, Any]:
    """The fields of parameter elements on one rank: split by some mesh dimension, whole, and of experts."""
    mesh = flow.naming.mesh
    expert_dims = [i for i in mesh.owning("experts") if mesh.degrees[i] > 1]
    of_experts = {flow.base(flow.operands[name][1])[0] for name in flow.runs if flow.operators[name] in EXPERT_PRODUCTS}
    totals: dict[str, Expr] = dict.fromkeys(("split", "whole", "expert"), 0)
    frozen: dict[str, Expr] = {}
    for port, role in flow.roles.items():
        if role != "parameter":
            continue
        types = flow.types(port)
        elements = flow.naming.local(flow.dims[port], types)
        kind = "split" if any(t.kind == "S" for t in types) else "whole"
        if any(types[i].kind == "S" for i in expert_dims):
            kind, elements = "expert", elements * prod(flow.naming.degrees[i] for i in expert_dims)
        elif port in of_experts and not expert_dims:
            kind = "expert"
        totals[kind] += elements
        if not flow.info(port).differentiable:
            part = "expert" if kind == "expert" else "dense"
            frozen[part] = frozen.get(part, 0) + elements
    every = {f"parameters_{kind}": total for kind, total in totals.items()}
    every |= {f"frozen_{part}": total for part, total in frozen.items()}
    return {name: polynomial(total) for name, total in every.items()}
