"""Whether a program may run in micro-batches: up to sums, every node must treat samples of the batch independently.

Every value has a kind:

- ``free``: the value does not depend on the batch.
- ``constant``: a constant whose shape depends on the batch size.
- ``table``: a constant whose elements depend on the batch size, or on their place in the batch.
- ``batch``: the value has the batch axis.
- ``sum``: the value is a sum over the batch.
- ``added``: the value is a buffer plus a sum over the batch. One micro-batch after the other adds its own.

A value also has a power. Beside its samples, it is proportional to this power of the batch size. A mean is a sum with
the power -1, and so is a sum divided by ``len(x)``.

Micro-batches are exact if the loss is a sum with the power 0 or -1. Sums over the batch that inputs alone decide are
first summed over all micro-batches (`autopar.capture.passes.batch_sums`). They are free then, so any function of them
may follow. A loss may be a sum of terms of both powers (`autopar.capture.passes.loss_terms`).

A decision may be a function of one extreme over the batch, such as `any` or `max`: micro-batches that decide alike are
a batch that decides so. If the function rises or falls (`extreme_of`), they need not decide alike.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import fx

from autopar._torch.operators import aten
from autopar.capture.analysis import Analysis
from autopar.capture.nodes import ARITHMETIC, SAME_ELEMENTS, copies, operator_name, output_nodes, shape
from autopar.ir.program import Block, CallSite, Program
from autopar.rules.operators import OVER_MICRO_BATCHES
from autopar.rules.rule import Call
from autopar.rules.variants import Bound

MEAN_REDUCTION = 1
_LARGEST, _LEAST = frozenset(["any", "max", "amax"]), frozenset(["all", "min", "amin"])
_RISING = SAME_ELEMENTS | {"unsqueeze", "squeeze", "view", "reshape", "gt", "ge", "add", "sub"}
_FALLING = frozenset(["lt", "le", "logical_not", "neg"])
Extreme = Callable[[Iterable[tuple[float, ...]]], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Status:
    """How a value depends on the samples of the batch."""

    kind: Literal["free", "constant", "table", "batch", "sum", "added"]
    power: int = 0


FREE, CONSTANT, TABLE = Status("free"), Status("constant"), Status("table")
BATCH, ADDED = Status("batch"), Status("added")
SUM, MEAN = Status("sum"), Status("sum", -1)


class Mixing(Exception):
    """An operator couples the samples of a batch."""


def is_mean(call: Call) -> bool:
    """Whether an operator reduces its input to a mean."""
    return bool(call.target._schema.name == "aten::mean" or call.named("reduction") == MEAN_REDUCTION)


def loss_over_micro_batches(program: Program, analysis: Analysis) -> tuple[Literal["sum", "mean"], str | None]:
    """The way to join the losses of micro-batches, and the reason why this is wrong (None if it is right)."""
    statuses = _statuses_outside(program)
    done: dict[tuple[int, tuple[Status, ...]], Sequence[Status]] = {}
    try:
        for call in program.calls:
            if call.phase == "denominator":
                statuses.update(dict.fromkeys(call.results, FREE))
                continue
            given = tuple(statuses.get(a, FREE) if isinstance(a, str) else FREE for a in call.arguments)
            key = (call.block, given)
            if key not in done:
                done[key] = _block_statuses(program, call, analysis, given)
            statuses.update(zip(call.results, done[key], strict=True))
    except Mixing as mixing:
        return "sum", str(mixing)
    for decision in program.decisions:
        if statuses.get(decision.name, FREE).kind in ("batch", "sum"):
            return "sum", f"{decision.line}: `{decision.code}` reads a sum over the batch"
    for buffer, update in program.updates.items():
        if statuses.get(update, FREE).kind not in ("free", "constant", "table", "added"):
            return "sum", f"buffer {buffer} is updated from the samples of the batch"
    status = statuses[program.loss]
    if status in (SUM, MEAN):
        return "sum" if status == SUM else "mean", None
    scale = f", times the batch size to the power {status.power}" if status.power else ""
    return "sum", f"the loss is neither a sum nor a mean over the batch (for the batch it is {status.kind!r}{scale})"


def _statuses_outside(program: Program) -> dict[str, Status]:
    """The statuses of inputs and constants."""
    graph = program.constants.graph
    known = constant_statuses(node for node in graph.nodes if node.op != "output")
    leaves = output_nodes(graph) if program.constants.results else ()
    statuses = {info.name: FREE if info.batch_dim is None else BATCH for info in program.inputs}
    return statuses | {name: known[leaf] for name, leaf in zip(program.constants.results, leaves, strict=True)}


def constant_statuses(nodes: Iterable[fx.Node]) -> dict[fx.Node, Status]:
    """The statuses of constant nodes in graph order. Without a second capture a constant may depend on the batch."""
    known: dict[fx.Node, Status] = {}
    for node in nodes:
        power = node.meta.get("batch_power", 1 if node.op == "call_function" else 0)
        status = TABLE if power is None else CONSTANT if power else FREE
        known[node] = max([status, *(known[n] for n in node.all_input_nodes)], key=(FREE, CONSTANT, TABLE).index)
    return known


def _block_statuses(program: Program, call: CallSite, analysis: Analysis, given: Sequence[Status]) -> list[Status]:
    block = program.blocks[call.block]
    known: dict[str, Status] = dict(zip(block.ports, given, strict=True))
    buffers, decides = _added_to(program, block, call), _deciding(program, block, call)
    for node in block.operators:
        operands = [known[n] for n in analysis.operands[call.block][node.name]]
        where = f"{call.path}: {node.meta['key']} ({node.target})"
        if node.name in buffers and (SUM in operands or ADDED in operands):
            known[node.name] = ADDED
        elif node in decides and BATCH in operands:
            known[node.name] = FREE
        elif ADDED in operands:
            raise Mixing(f"{where} reads a buffer to which samples of the batch were added")
        else:
            known[node.name] = status_of(analysis, call.block, node, operands, where)
    return [known[name] for name in block.outputs]


def _deciding(program: Program, block: Block, call: CallSite) -> set[fx.Node]:
    """The extremes of a block of which nothing is made but decisions, each of one extreme."""
    names = {decision.name for decision in program.decisions}
    outputs = zip(output_nodes(block.graph), call.results, strict=True)
    others = {node for node, result in outputs if result not in names}
    alone = set[fx.Node]()
    for node in reversed(block.graph.nodes):
        users = [user for user in node.users if user.op != "output"]
        is_plain = node.op == "call_function" and len(node.all_input_nodes) == 1
        if is_plain and node not in others and alone.issuperset(users):
            alone.add(node)
    return {node for node in alone if operator_name(node) in _LARGEST | _LEAST and prod(shape(node)) == 1}


def extreme_of(program: Program, decision: str) -> Extreme | None:
    """`max` or `min`, if this one of the micro-batches' values of a decision is the batch's value. None if not."""
    call = next((call for call in program.calls if decision in call.results), None)
    node: Any = None if call is None else output_nodes(program.blocks[call.block].graph)[call.results.index(decision)]
    rises = True
    while isinstance(node, fx.Node) and node.op == "call_function":
        name = operator_name(node)
        if name in _LARGEST | _LEAST:
            return None if prod(shape(node)) > 1 else max if rises == (name in _LARGEST) else min
        if name not in _RISING | _FALLING or len(node.all_input_nodes) > 1 or _loses_signs(node, name):
            return None
        rises ^= name in _FALLING
        node = node.args[0]
    return None


def _loses_signs(node: Any, name: str) -> bool:
    """Whether a cast or negation takes numbers below zero for others: it neither rises nor falls."""
    before, after = node.all_input_nodes[0].meta["info"].dtype, node.meta["info"].dtype
    return name in SAME_ELEMENTS | {"logical_not"} and before.is_signed and not after.is_signed


def _added_to(program: Program, block: Block, call: CallSite) -> set[str]:
    """The results of a block that are a buffer and something added to it, if nothing else reads the buffer."""
    readers = Counter(a for c in program.calls for a in c.arguments if isinstance(a, str))
    buffer_of = {update: buffer for buffer, update in program.updates.items() if readers[buffer] == 1}
    updates = {name: buffer_of.get(result) for name, result in zip(block.outputs, call.results, strict=True)}
    ports = dict(zip(block.ports, call.arguments, strict=True))
    users_added = set[str]()
    for node in block.graph.nodes:
        buffer, chain = updates.get(node.name), list(copies(node))
        added = chain[-1]
        if buffer is not None and added.target is aten.add.Tensor and not added.kwargs:
            reads = [list(copies(a)) for a in added.all_input_nodes]
            read = [r for r in reads if ports.get(r[-1].name) == buffer and r[-1].op == "placeholder"]
            if len(read) == 1 and all(len(n.users) == 1 for n in (*read[0], *chain[1:])):
                users_added.update(n.name for n in chain)
    return users_added


def status_of(analysis: Analysis, block: int, node: fx.Node, operands: Sequence[Status], where: str) -> Status:
    """The status of an operator's result. Raises `Mixing`, which begins with `where`, if it couples samples."""
    bound, call = analysis.bounds[block][node.name], analysis.calls[block][node.name]
    rule, kinds = bound.rule, {status.kind for status in operands}
    if call.target is OVER_MICRO_BATCHES:
        if operands[0] not in (FREE, CONSTANT, MEAN):
            raise Mixing(f"{where} adds a sum over the batch to a mean")
        return SUM  # over micro-batches
    number = node.meta.get("batch_power", 0) if operator_name(node) in ARITHMETIC else 0
    if not kinds & {"batch", "sum"}:
        if number is None or "table" in kinds:
            return TABLE
        return CONSTANT if "constant" in kinds else Status("free", _power(bound, node, operands, where) + number)
    if number is None or "table" in kinds:
        raise Mixing(f"{where} uses a number that depends on the batch size, or on the place in the batch")
    holders = [f for f, atoms in bound.factors.items() if any(a in analysis.batch_axes for a, _ in atoms)]
    if "batch" in kinds and any(f in rule.whole for f in holders):
        reason = "has no rule" if not rule.known else "needs all samples at once"
        raise Mixing(f"{where} {reason}")
    if "sum" in kinds:
        return Status("sum", _after_sum(bound, node, operands, where) + number)
    power = _power(bound, node, operands, where) + number
    parts = [{f for dim in spec for f in dim} for spec in rule.inputs]
    missing = [k for k, s in enumerate(operands) if s.kind == "batch" and parts[k].isdisjoint(holders)]
    if len(holders) > 1 or missing:
        raise Mixing(f"{where} pairs samples of the batch with each other")
    if not any(f in rule.reduced for f in holders):
        return Status("batch", power)
    return Status("sum", power - 1 if is_mean(call) else power)


def _power(bound: Bound, node: fx.Node, operands: Sequence[Status], where: str) -> int:
    """The power of the batch size in a result. Products, quotients and linear operators keep it."""
    scaled = {k for k, status in enumerate(operands) if status.power}
    if not scaled:
        return 0
    name = operator_name(node)
    if name in ("mul", "div") and scaled <= {0, 1}:
        first, *second = (status.power for status in operands)
        return first + sum(second) if name == "mul" else first - sum(second)
    powers = {operands[k].power for k in scaled}
    if len(powers) > 1 or scaled not in bound.rule.linear:
        raise Mixing(f"{where} uses a number that depends on the batch size")
    return powers.pop()


def _after_sum(bound: Bound, node: fx.Node, operands: Sequence[Status], where: str) -> int:
    """The power of the batch size behind sums over the batch. Only linear operators may follow, and sums do not mix."""
    sums = {k for k, status in enumerate(operands) if status.kind == "sum"}
    powers = {operands[k].power for k in sums}
    if any(status.kind in ("batch", "constant") for status in operands) or len(powers) > 1:
        raise Mixing(f"{where} combines a sum over the batch with other values of the batch")
    for group in bound.rule.linear:
        if sums == group:
            return _power(bound, node, operands, where)
        if sums < group and powers == {-1} and all(s == FREE for k, s in enumerate(operands) if k not in sums):
            return -1  # a mean over the batch of something with a number added
    raise Mixing(f"{where} is not linear in a sum over the batch")
