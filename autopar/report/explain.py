"""From a program and its plan to a summary: split axes, collectives of the generated code, operators without a rule."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from autopar.capture.analysis import Analysis
from autopar.capture.nodes import operator_name, value_infos
from autopar.cost_model.machine.collectives import sent_bytes
from autopar.cost_model.work.block_work import VARIANTS, evaluate, sizes_on
from autopar.cost_model.work.coverage import whole_on_every_rank, works_of
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.cluster import ClusterSpec
from autopar.ir.explanation import (
    BlockSummary,
    ParameterSummary,
    SelectiveSummary,
    StageSummary,
    Summary,
    Traffic,
    WithoutRule,
)
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, Type, owned_by, shares_parameter
from autopar.ir.stages import main_calls, stages_of
from autopar.ir.storage import boundary_types
from autopar.lowering.collectives import collectives_of

_FEATURES = {("linear", 0): "column-parallel", ("linear", 1): "row-parallel", ("embedding", 0): "vocabulary-parallel"}
_ORDINALS = ("first", "second", "third", "fourth", "fifth")


def summarise(
    program: Program,
    analysis: Analysis,
    plan: Plan,
    cluster: ClusterSpec,
    call_s: Sequence[float] = (),
    works: ProgramWorks | None = None,
) -> Summary:
    """Counts, prices and words about a plan on a program."""
    return Summary(
        without_rule=tuple(_without_rule(program, analysis, plan, cluster)),
        parameters=tuple(_parameters(program, plan)),
        blocks=tuple(_block(program, analysis, plan, index, works) for index in range(len(program.blocks))),
        once_a_step=tuple(_once_a_step(program, plan)),
        stages=tuple(_stages(program, analysis, plan, call_s)) if plan.degrees.pp > 1 else (),
    )


def _without_rule(program: Program, analysis: Analysis, plan: Plan, cluster: ClusterSpec) -> Iterator[WithoutRule]:
    """Operators without a rule, and calls that the rule of their operator does not cover, which are whole likewise."""
    if all(bound.rule.known for bounds in analysis.bounds for bound in bounds.values()):
        return
    works = list(works_of(program, analysis, plan.blocks, plan.degrees, cluster))
    for op in whole_on_every_rank(works):
        yield WithoutRule(
            operator=op.operator,
            where=op.where,
            num_calls=op.num_calls,
            seconds=op.seconds,
            kept_bytes=round(op.kept_bytes),
        )


# ---- parameters ----


def _parameters(program: Program, plan: Plan) -> Iterator[ParameterSummary]:
    """Parameters by name, with ``*`` for numbers. Parameters that are held alike share an entry."""
    uses = _first_uses(program)
    counts: dict[tuple[str, tuple[int, ...], tuple[Type, ...], str], int] = {}
    for name, info in program.parameters.items():
        if name in uses:
            block, port, operator = uses[name]
            types = tuple(plan.blocks[block].ports[port])
            key = (_starred(name), info.shape, types, operator)
            counts[key] = counts.get(key, 0) + 1
    for (name, shape, types, operator), count in counts.items():
        dims = [dim for dim in zip(plan.mesh.names, plan.mesh.degrees, types, strict=True) if dim[1] > 1]
        split = {m: _split_words(t, degree, operator) for m, degree, t in dims}
        shares = [m for m, _, t in dims if shares_parameter(m, t)]
        if shares and plan.degrees.zero == 3:
            ranks = plan.degrees.shard_ranks // prod(n for m, n, t in dims if m == "ep" and t.kind == "S")
            split |= dict.fromkeys(shares, f"sharded over {ranks} (ZeRO-3)")
        yield ParameterSummary(name=name, num_copies=count, shape=shape, split=split)


def other_size(program: Program, summary: Summary | None) -> str:
    """The first parameter that a plan's summary has in another size or number than this model, in words."""
    ours = Counter((_starred(name), info.shape) for name, info in program.parameters.items())
    theirs = Counter[tuple[str, tuple[int, ...]]]()
    for p in () if summary is None else summary.parameters:
        theirs[p.name, p.shape] += p.num_copies
    for (name, shape), count in theirs.items():
        here = [f"{number} of shape {list(size)}" for (named, size), number in ours.items() if named == name]
        if here and ours[name, shape] != count:
            return f"{name}: {count} of shape {list(shape)} there, {' and '.join(here)} here"
    return ""


def _starred(name: str) -> str:
    """A name with ``*`` for its first number."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name, count=1)


def _first_uses(program: Program) -> dict[str, tuple[int, str, str]]:
    """Per parameter, the block and port that it is first bound to, and the operator that uses it there as a weight."""
    operators: dict[tuple[int, str], str] = {}
    for index, block in enumerate(program.blocks):
        for node in block.graph.nodes:
            users = [user for user in node.users if user.op == "call_function"]
            if node.op == "placeholder" and users:
                operators[index, node.name] = operator_name(users[0])
    uses: dict[str, tuple[int, str, str]] = {}
    for call in program.calls:
        for port, name in zip(program.blocks[call.block].ports, call.arguments, strict=True):
            if isinstance(name, str) and name in program.parameters and name not in uses:
                uses[name] = call.block, port, operators.get((call.block, port), "")
    return uses


def _split_words(kind: Type, degree: int, operator: str) -> str:
    if kind.kind != "S":
        return "whole"
    words = f"dimension {kind.dim} in {degree}"
    if kind.position > 0:
        ordinal = _ORDINALS[kind.position] if kind.position < len(_ORDINALS) else f"number {kind.position + 1}"
        words = f"dimension {kind.dim}, its {ordinal} factor, in {degree}"
    feature = _FEATURES.get((operator, kind.dim))
    return f"{words} ({feature})" if feature else words


# ---- blocks ----


def _block(program: Program, analysis: Analysis, plan: Plan, index: int, works: ProgramWorks | None) -> BlockSummary:
    block = program.blocks[index]
    used = {a for call in program.calls for a in call.arguments} | {program.loss, *program.denominators}
    uses = program.uses_of_block(index)
    kept = [o for k, o in enumerate(block.outputs) if any(call.results[k] in used for call in uses)]
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}
    for dim, when, collective, whole_bytes in collectives_of(
        analysis, block, index, plan.blocks[index], plan.mesh, keep=kept, regather=plan.regather,
        loss_chunks=plan.degrees.loss_chunks,
    ):  # fmt: skip
        count, sent = totals.get((dim, when, collective), (0, 0))
        size = round(sent_bytes(collective, whole_bytes, plan.mesh.degree_of(dim)))
        totals[dim, when, collective] = (count + 1, sent + size)
    names = analysis.dims[index]
    results = (f"{placed(analysis, names[o], plan.blocks[index].results[o], plan)} ({o})" for o in kept)
    return BlockSummary(
        name=block.name,
        num_calls=len(uses),
        num_operators=len(analysis.bounds[index]),
        traffic=tuple(
            Traffic(mesh_dim=dim, when=when, collective=collective, count=count, sent_bytes=sent)
            for (dim, when, collective), (count, sent) in sorted(totals.items())
        ),
        results=tuple(results),
        selective=_selective(program, plan, index, works) if works and plan.blocks[index].recomputed else None,
    )


def _selective(program: Program, plan: Plan, index: int, works: ProgramWorks) -> SelectiveSummary | None:
    """Selective recomputation of a block, as the cost model counts it."""
    roles = zip(main_calls(program), works.calls, strict=True)
    role = next((role for call, role in roles if program.calls[call].block == index and role), None)
    if role is None:
        return None
    sizes = sizes_on(plan.mesh, program.sequence, plan.degrees.micro_batch)
    work = evaluate(works.family.block(role, VARIANTS[0]), sizes)
    if work.selected is None:
        return None
    return SelectiveSummary(
        num_operators=len(work.selected.operators),
        saved_bytes=float(work.saved_eager_bytes),
        saved_selectively=float(work.selected.saved_bytes),
        flops=float(sum(op.passes * op.flops for op in work.products if op.kind != "again")),
        more_flops=float(sum(op.flops for op in work.selected.operators)),
    )


def placed(analysis: Analysis, dims: Dims, types: tuple[Type, ...], plan: Plan) -> str:
    """``(batch / dp, sequence / tp, 64)``: the dimensions of a value and who splits them."""
    words = []
    for d, axes in enumerate(dims.axes):
        kinds = ("batch", analysis.batch_axes), ("sequence", analysis.sequence_axes)
        named = [name for name, members in kinds if set(axes) & members]
        word = "·".join(named) or str(dims.shape[d])
        by = [m for m, t in zip(plan.mesh.names, types, strict=True) if t.kind == "S" and t.dim == d]
        words.append(" / ".join([word, *by]))
    whole = "scalar" if not words else f"({', '.join(words)})"
    partial = [m for m, t in zip(plan.mesh.names, types, strict=True) if t.kind == "P"]
    return f"{whole}, a sum over {' and '.join(partial)} still to come" if partial else whole


# ---- stages ----


def _stages(program: Program, analysis: Analysis, plan: Plan, call_s: Sequence[float]) -> Iterator[StageSummary]:
    types = boundary_types(program, plan.blocks)
    seconds = dict(zip(main_calls(program), call_s, strict=True))
    infos = value_infos(program)
    for stage in stages_of(program, plan.cuts, plan.recomputed):
        calls = [program.calls[i] for i in stage.calls]
        shapes = {v: analysis.outer[v].local_shape(types[v], plan.mesh.degrees) for v in stage.sends}
        yield StageSummary(
            rank=plan.degrees.rank_of_stage(stage.index),
            first=calls[0].path,
            last=calls[-1].path,
            num_calls=len(calls),
            seconds=sum(seconds[i] for i in stage.calls),
            num_parameters=sum(program.parameters[name].num_elements for name in stage.parameters),
            sent_bytes=sum(prod(shape) * infos[v].dtype.itemsize for v, shape in shapes.items()),
            recomputed=tuple(value for values in stage.again.values() for value in values),
        )


# ---- what happens once ----


def _once_a_step(program: Program, plan: Plan) -> Iterator[str]:
    degrees = plan.degrees
    if degrees.data_ranks > 1:
        over = " and ".join(name for name, degree in (("dp", degrees.dp), ("cp", degrees.cp)) if degree > 1)
        words = {
            0: "gradients of all parameters are all-reduced once a step (ZeRO-0)",
            1: "gradients are reduce-scattered once a step, parameters gathered once (ZeRO-1)",
            2: "gradients are reduce-scattered every micro-batch, parameters gathered once (ZeRO-2)",
            3: "each block's parameters are gathered for forward and again for backward, gradients "
            "reduce-scattered, every micro-batch (ZeRO-3)",
        }[degrees.zero]
        yield f"{over}: {words}"
    if degrees.dp_replicate > 1:
        yield f"dp: gradient shards are all-reduced over {degrees.dp_replicate} replicas"
    uses = _first_uses(program)
    for index, (name, degree) in enumerate(plan.mesh.as_dict().items()):
        deferred = [n for n, (block, port, _) in uses.items() if plan.blocks[block].ports[port][index].kind == "R"]
        if deferred and degree > 1 and owned_by(name) == "parameters":
            trained = sum(program.parameters[n].num_elements for n in deferred)
            yield f"{name}: gradients of {len(deferred)} replicated parameters ({trained:,} elements) are all-reduced"
    if program.unused:
        yield f"{len(program.unused)} parameters do not take part in the loss: {', '.join(list(program.unused)[:5])}"
