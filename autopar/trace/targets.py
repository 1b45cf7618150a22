"""Which inputs can mark samples to be ignored: the integer targets of a cross-entropy with `ignore_index`.

A batch that is too short may be padded with ignored samples where nothing of the loss can tell: every sum over the
batch on the way to the loss is a sum of cross-entropies, or a count of targets that are not ignored, and those targets
are views of an input. Found on the graph, never by names.
"""

from collections.abc import Iterator

import torch
from torch import fx

from autopar.ir.program import CallSite, Program
from autopar.trace.analysis import Analysis
from autopar.trace.nodes import output_nodes

aten = torch.ops.aten
VIEWS = (
    aten.reshape.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.transpose.int,
    aten.permute.default,
    aten.flatten.using_ints,
    aten.clone.default,
    aten.detach.default,
    aten.to.dtype,
)
TARGET, IGNORE_INDEX = 1, 4  # positions of arguments of cross_entropy_loss


def ignored_targets(program: Program, analysis: Analysis) -> dict[str, int] | None:
    """The value that makes a sample of each target input count for nothing; None where no such mask exists."""
    if program.denominator is None or program.mixes_batch is not None or program.loss_reduction != "sum":
        return None
    found: dict[str, int] = {}
    sums = {phase: list(_sums_over_the_batch(program, analysis, phase)) for phase in ("main", "denominator")}
    if not all(sums.values()):
        return None
    for phase, nodes in sums.items():
        for call_index, node in nodes:
            target = _counted(node) if phase == "denominator" else _masked(node)
            if target is None:
                return None
            source, ignored = target
            name = _input_of(program, call_index, source, ignored)
            if name is None or found.setdefault(name, ignored) != ignored:
                return None
    return found


def _sums_over_the_batch(program: Program, analysis: Analysis, phase: str) -> Iterator[tuple[int, fx.Node]]:
    """Operators of a phase that reduce the batch axis, with the call they belong to."""
    for index, call in enumerate(program.calls):
        if call.phase != phase:
            continue
        for node in program.blocks[call.block].graph.nodes:
            bound = analysis.bounds[call.block].get(node.name)
            if bound is None:
                continue
            reduced = [f for f in bound.rule.reduced for axis, _ in bound.factors[f] if axis in analysis.batch_axes]
            if reduced:
                yield index, node


def _masked(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Target and ignored value of a summed cross-entropy."""
    target = node.args[TARGET] if node.target is aten.cross_entropy_loss.default else None
    ignored = node.args[IGNORE_INDEX] if target is not None and len(node.args) > IGNORE_INDEX else None
    return (target, ignored) if isinstance(target, fx.Node) and isinstance(ignored, int) else None


def _counted(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Target and ignored value of a count of targets that are not ignored."""
    valid = node.args[0] if node.target is aten.sum.default else None
    if not isinstance(valid, fx.Node) or valid.target is not aten.ne.Scalar:
        return None
    target, ignored = valid.args
    return (target, ignored) if isinstance(target, fx.Node) and isinstance(ignored, int) else None


def _input_of(program: Program, call_index: int, node: fx.Node, ignored: int) -> str | None:
    """The input with a batch that a value is a view of, None where there is more between them."""
    call: CallSite = program.calls[call_index]
    while True:
        while node.op == "call_function":
            padded = node.target is aten.constant_pad_nd.default and node.args[2] == ignored
            operand = node.args[0]
            if not isinstance(operand, fx.Node) or not (padded or node.target in VIEWS):
                return None
            node = operand
        ports = [port.name for port in program.blocks[call.block].ports]
        name = call.arguments[ports.index(node.name)]
        if not isinstance(name, str):
            return None
        for info in program.inputs:
            if info.name == name:
                return name if info.batch_dim is not None and not info.dtype.is_floating_point else None
        maker = next((c for c in program.calls if name in c.results), None)
        if maker is None:
            return None
        call, node = maker, output_nodes(program.blocks[maker.block].graph)[maker.results.index(name)]
