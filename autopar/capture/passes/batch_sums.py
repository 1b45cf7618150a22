"""Sums over the batch that inputs alone decide, such as the number of tokens that count, or the mean of a mask.

A loss may divide by such a sum, clamp it, or normalise by it. The micro-batches of a step must then use the sum of the
whole batch. So the sum ends the additive part of a computation: the runtime adds it up over all micro-batches before
the first backward pass. Everything behind it is computed from the total, in every micro-batch.

A total may depend on other totals, as a variance depends on the mean. The totals of level 0 depend on no other total,
and those of level n depend on totals of level n - 1.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.analysis import analyse, info_of
from autopar.capture.micro_batches import BATCH, FREE, MEAN, SUM, Mixing, Status, constant_statuses, status_of
from autopar.capture.nodes import argument, closure, compute, computed_from, replace_node, value
from autopar.ir.program import Block, CallSite, Constants, InputInfo, Program
from autopar.rules.rule import Call

_DEVIATIONS = (aten.std.correction, aten.std.dim, aten.std.default)
_VARIANCES = (aten.var.correction, aten.var.dim, aten.var.default, *_DEVIATIONS)


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchSums:
    """The totals of a graph, by level. `free` are the values that are equal in all micro-batches of a step."""

    graph: fx.Graph
    levels: list[list[fx.Node]] = field(default_factory=list)
    free: set[fx.Node] = field(default_factory=set)
    counts: dict[Any, fx.Node] = field(default_factory=dict)

    def num_micro_batches(self, like: fx.Node) -> fx.Node:
        """The number of micro-batches in the dtype of another node. It is a total of ones."""
        dtype = value(like).dtype
        if dtype not in self.counts:
            kind = {"dtype": dtype, "device": torch.device("cpu")}  # generated code has the device of its rank
            first = next(n for n in self.graph.nodes if n.op == "call_function")
            self.counts[dtype] = compute(first, aten.full.default, [], 1, like=like, **kind)
            self.levels[:] = self.levels or [[]]
            self.levels[0].append(self.counts[dtype])
        return self.counts[dtype]


def batch_sums(
    graph: fx.Graph,
    loss: fx.Node,
    inputs: Mapping[fx.Node, InputInfo],
    constants: Collection[fx.Node],
    parameters: Collection[fx.Node],
) -> BatchSums:
    """Find the totals that a loss needs, and make the graph use them. Placeholders and constants are nodes."""
    while True:
        statuses, uses, levels, coupled = _statuses(graph, loss, inputs, constants)
        variances = [node for node in coupled if node.target in _VARIANCES]
        if not variances:
            break
        for node in variances:
            _open_variance(node)
    batch = BatchSums(graph=graph)
    batch.levels.extend([] for _ in range(1 + max((levels[total] for total in uses), default=-1)))
    ends = {
        _end(batch, node, uses[node], statuses[node], levels[node]) for node in sorted(uses, key=levels.__getitem__)
    }
    tables = {n for n in constants if statuses[n] != FREE}
    fixed = set(constants) - tables | {n for n, i in inputs.items() if i.batch_dim is None}
    fixed |= {*parameters, *ends}
    computed_from(fixed, (node for node in graph.nodes if node not in tables))
    batch.free.update(fixed)
    return batch


def _statuses(
    graph: fx.Graph, loss: fx.Node, inputs: Mapping[fx.Node, InputInfo], constants: Collection[fx.Node]
) -> tuple[dict[fx.Node, Status], dict[fx.Node, list[fx.Node]], dict[fx.Node, int], list[fx.Node]]:
    """The statuses of values of inputs, the users of every total, the levels of values, nodes that couple samples."""
    statuses = {n: FREE if i.batch_dim is None else BATCH for n, i in inputs.items()} | constant_statuses(constants)
    needed = closure([loss])
    nodes = computed_from(set(statuses), needed)
    program = _program_of(nodes, inputs)
    analysis = analyse(program)
    levels = dict.fromkeys(statuses, 0)
    uses, coupled = dict[fx.Node, list[fx.Node]](), list[fx.Node]()
    for node, copy in zip(nodes, program.blocks[0].operators, strict=True):
        operands = Call.of(node.target, node.args, node.kwargs, node.meta["info"], info_of)[1]
        if any(o not in statuses for o in operands):
            continue
        given = [statuses[o] for o in operands]
        totals = {o for o in operands if statuses[o] in (SUM, MEAN)}
        for wanted in (set[fx.Node](), totals):
            own_statuses = [FREE if o in wanted else s for o, s in zip(operands, given, strict=True)]
            try:
                statuses[node] = status_of(analysis, 0, copy, own_statuses, str(node))
            except Mixing:
                continue
            for total in wanted:
                uses.setdefault(total, []).append(node)
            levels[node] = max((levels[o] + (o in wanted) for o in operands), default=0)
            break
        else:
            coupled.append(node)
    inside = set(needed)
    for node in nodes:
        if statuses.get(node) in (SUM, MEAN):
            outside = [user for user in node.users if user in inside and user not in statuses]
            if outside:
                uses.setdefault(node, []).extend(outside)
    return statuses, uses, levels, coupled


def _program_of(nodes: Sequence[fx.Node], inputs: Mapping[fx.Node, InputInfo]) -> Program:
    """A program of one block that computes nodes from inputs, for analysis alone."""
    graph, copies, names = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, str]()
    for node in dict.fromkeys(o for n in nodes for o in n.all_input_nodes if o not in set(nodes)):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["info"] = node.meta["info"]
        names[copies[node].name] = inputs[node].name if node in inputs else f"constant {node.name}"
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(())
    block = Block(name="inputs", graph=graph, ports=dict.fromkeys(names, "input"), outputs=(), signature="")
    return Program(
        blocks=(block,),
        calls=(CallSite(block=0, path="inputs", arguments=tuple(names.values()), results=()),),
        parameters={},
        inputs=tuple(info for node, info in inputs.items() if node in copies),
        constants=Constants(graph=fx.Graph(), buffers=(), results=()),
        loss="",
    )


def _end(sums: BatchSums, node: fx.Node, users: Sequence[fx.Node], status: Status, level: int) -> fx.Node:
    """Make users take the total of a node. The total of means is divided by the number of micro-batches."""
    total = node
    if set(users) != set(node.users):  # others take the sum of their own micro-batch
        total = compute(node.next, aten.clone.default, node, like=node)
    sums.levels[level].append(total)
    value_of_all = total
    if status == MEAN:
        count = sums.num_micro_batches(total)
        value_of_all = compute(total.next, aten.div.Tensor, total, count, like=total)
    if value_of_all is not node:
        for user in users:
            user.replace_input_with(node, value_of_all)
    return value_of_all


def _open_variance(node: fx.Node) -> None:
    """Write a variance or standard deviation as sums, with the number of its elements as a sum of ones."""
    x, dim, keeps = argument(node, "self"), argument(node, "dim"), bool(argument(node, "keepdim"))
    correction = argument(node, "unbiased" if "correction" not in str(node.target) else "correction")
    dims = list(dim) if dim else list(range(value(x).dim()))
    emit = partial(compute, node)
    square = emit(aten.square.default, emit(aten.sub.Tensor, x, emit(aten.mean.dim, x, dims, True)))
    total = emit(aten.sum.dim_IntList, square, dims, keeps)
    count = emit(aten.sum.dim_IntList, emit(aten.ones_like.default, x), dims, keeps)
    rest = emit(aten.sub.Tensor, count, 1 if correction is None else int(correction))
    result = emit(aten.div.Tensor, total, emit(aten.clamp_min.default, rest, 0))
    replace_node(node, emit(aten.sqrt.default, result) if node.target in _DEVIATIONS else result)
