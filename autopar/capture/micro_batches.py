"""Whether a program may run in micro-batches: up to sums, every node must treat samples of the batch independently.

Every value has one of these statuses:

- ``free``: the value does not depend on the batch.
- ``constant``: a table that may depend on the batch size.
- ``batch``: the value has the batch axis.
- ``sum`` or ``mean``: the value is a sum or mean over the batch.
- ``added``: the value is a buffer plus a sum over the batch. One micro-batch after the other adds its own.

Micro-batches are exact if the loss is a sum or a mean. A sum may be divided by a denominator, which is first summed
over all micro-batches. A mean is divided by the number of micro-batches. A loss may be a sum of both
(`autopar.capture.passes.loss_terms`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from autopar._torch.operators import aten
from autopar.capture.analysis import Analysis
from autopar.ir.program import Block, CallSite, Program
from autopar.rules.operators import OVER_MICRO_BATCHES
from autopar.rules.rule import Call, Spec
from autopar.rules.variants import Bound

Status = Literal["free", "constant", "batch", "sum", "mean", "added"]
MEAN_REDUCTION = 1


class _Mixes(Exception):
    """An operator couples the samples of a batch."""


def is_mean(call: Call) -> bool:
    """Whether an operator reduces its input to a mean."""
    schema = call.target._schema
    if schema.name == "aten::mean":
        return True
    for index, argument in enumerate(schema.arguments):
        if argument.name == "reduction":
            return bool(call.arg(index, "reduction", MEAN_REDUCTION) == MEAN_REDUCTION)
    return False


def loss_over_micro_batches(program: Program, analysis: Analysis) -> tuple[Literal["sum", "mean"], str | None]:
    """The way to join the losses of micro-batches, and the reason why this is wrong (None if it is right)."""
    statuses: dict[str, Status] = {info.name: "free" for info in program.inputs}
    statuses.update({info.name: "batch" for info in program.inputs if info.batch_dim is not None})
    statuses.update(dict.fromkeys(program.constants.results, "constant"))
    done: dict[tuple[int, tuple[Status, ...]], Sequence[Status]] = {}
    try:
        for call in program.calls:
            if call.phase == "denominator":
                statuses.update(dict.fromkeys(call.results, "free"))
                continue
            given = tuple(statuses.get(a, "free") if isinstance(a, str) else "free" for a in call.arguments)
            key = (call.block, given)
            if key not in done:
                done[key] = _block_statuses(program, program.blocks[call.block], call, analysis, given)
            statuses.update(zip(call.results, done[key], strict=True))
    except _Mixes as mixes:
        return "sum", str(mixes)
    for buffer, update in program.updates.items():
        if statuses.get(update, "free") not in ("free", "constant", "added"):
            return "sum", f"buffer {buffer} is updated from the samples of the batch"
    status = statuses[program.loss]
    if status in ("sum", "mean"):
        return status, None
    return "sum", f"the loss is neither a sum nor a mean over the batch (for the batch it is {status!r})"


def _block_statuses(
    program: Program, block: Block, call: CallSite, analysis: Analysis, given: Sequence[Status]
) -> list[Status]:
    known: dict[str, Status] = dict(zip(block.ports, given, strict=True))
    buffers = _added_to(program, block, call)
    for node in block.graph.nodes:
        if node.op != "call_function":
            continue
        bound = analysis.bounds[call.block][node.name]
        operands = [known[n] for n in analysis.operands[call.block][node.name]]
        where = f"{call.path}: {node.meta['key']} ({node.target})"
        if node.meta.get("batch_literal") and "sum" in operands:
            raise _Mixes(f"{where} uses a number that depends on the batch size")
        if "added" in operands:
            raise _Mixes(f"{where} reads a buffer to which samples of the batch were added")
        if node.name in buffers and "sum" in operands:
            known[node.name] = "added"
            continue
        known[node.name] = _status(bound, analysis.calls[call.block][node.name], operands, analysis.batch_axes, where)
    return [known[name] for name in block.outputs]


def _added_to(program: Program, block: Block, call: CallSite) -> set[str]:
    """The results of a block that are a buffer and something added to it, if nothing else reads the buffer."""
    readers = Counter(a for c in program.calls for a in c.arguments if isinstance(a, str))
    buffer_of = {update: buffer for buffer, update in program.updates.items() if readers[buffer] == 1}
    updates = {name: buffer_of.get(result) for name, result in zip(block.outputs, call.results, strict=True)}
    ports = dict(zip(block.ports, call.arguments, strict=True))
    found = set()
    for node in block.graph.nodes:
        buffer = updates.get(node.name)
        if buffer is not None and node.target is aten.add.Tensor and not node.kwargs:
            read = [a for a in node.all_input_nodes if ports.get(a.name) == buffer and a.op == "placeholder"]
            if len(read) == 1 and len(read[0].users) == 1 and list(node.args).count(read[0]) == 1:
                found.add(node.name)
    return found


def _status(bound: Bound, call: Call, operands: Sequence[Status], batch: frozenset[int], where: str) -> Status:
    rule = bound.rule
    if call.target is OVER_MICRO_BATCHES:
        if operands[0] not in ("mean", "free", "constant"):
            raise _Mixes(f"{where} adds a sum over the batch to a mean")
        return "sum"  # over micro-batches
    holders = [f for f, atoms in bound.factors.items() if any(a in batch for a, _ in atoms)]
    mixing = [f for f in holders if f in rule.whole]
    if mixing and "batch" in operands:
        reason = "has no rule" if not rule.known else "needs all samples at once"
        raise _Mixes(f"{where} {reason}")
    if {"sum", "mean"} & set(operands):
        return _after_reduction(bound, operands, where)
    if "batch" not in operands:
        return "constant" if "constant" in operands else "free"
    missing = [k for k, s in enumerate(operands) if s == "batch" and not _has(rule.inputs[k], holders)]
    if len(holders) > 1 or missing:
        raise _Mixes(f"{where} pairs samples of the batch with each other")
    reduced = [f for f in holders if f in rule.reduced]
    if not reduced:
        return "batch"
    return "mean" if is_mean(call) else "sum"


def _has(spec: Spec, factors: Sequence[str]) -> bool:
    return any(f in dim for dim in spec for f in factors)


def _after_reduction(bound: Bound, operands: Sequence[Status], where: str) -> Status:
    """The status after a sum or mean over the batch. Only linear operators may follow it; sums and means do not mix."""
    reduced: Mapping[int, Status] = {k: s for k, s in enumerate(operands) if s in ("sum", "mean")}
    kinds = set(reduced.values())
    if len(kinds) > 1 or "batch" in operands or (kinds == {"sum"} and "constant" in operands):
        raise _Mixes(f"{where} combines a sum over the batch with other values of the batch")
    kind: Status = kinds.pop()
    for group in bound.rule.linear:
        if set(reduced) <= group and (set(reduced) == group or kind == "mean"):
            return kind
    raise _Mixes(f"{where} is not linear in a sum over the batch")
