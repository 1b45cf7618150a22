"""Inputs that can mark samples to be ignored: targets of a cross-entropy with `ignore_index`, and weights.

A batch that is too short may be padded with ignored samples, if these cannot change the loss. Two conditions ensure
this. Every sum over the batch in the loss is a sum of cross-entropies, or of a product with a mask. Every such sum in
the denominator counts the targets that are not ignored, or sums such a mask.

Targets and masks are views of an input. The input is padded with the ignored target or with weight zero. The analysis
reads the graph, and never uses names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from autopar._torch.operators import aten
from autopar.capture.analysis import Analysis, analyse, with_dims
from autopar.capture.micro_batches import loss_over_micro_batches
from autopar.capture.nodes import arg, before, operator_name, output_nodes
from autopar.ir.program import CallSite, Program

# and copies
_VIEWS = frozenset(
    ["reshape", "slice", "select", "unsqueeze", "squeeze", "transpose", "permute", "flatten", "clone", "detach", "to"]
)
SUMS = (aten.sum.default, aten.sum.dim_IntList)
TARGET, IGNORE_INDEX = 1, 4  # positions of arguments of cross_entropy_loss
WEIGHTLESS = 0


@dataclass(frozen=True, slots=True)
class _Mask:
    """A value that may mask samples. Ignored samples have the number `ignored`; `reader` is the user of a weight."""

    value: fx.Node
    ignored: int
    reader: fx.Node | None = None


def judged(program: Program) -> Program:
    """The program with its axes, and with the verdicts on its batch: how losses are joined, and what can be ignored."""
    analysis = analyse(program)
    reduction, mixes = loss_over_micro_batches(program, analysis)
    judged_program = replace(with_dims(program, analysis), loss_reduction=reduction, mixes_batch=mixes)
    return replace(judged_program, ignored=ignored_targets(judged_program, analysis))


def agreed(program: Program, small: Program) -> tuple[Program, Program]:
    """The programs of two captures. Micro-batches are exact only if both captures say so."""
    reason = small.mixes_batch or program.mixes_batch
    return coupled(program, reason), coupled(small, reason)


def coupled(program: Program, reason: str | None) -> Program:
    """The program with a reason against micro-batches that was found at other sizes. None leaves it as it is."""
    if reason is None:
        return program
    return replace(program, loss_reduction="sum", mixes_batch=reason, ignored=None)


def ignored_targets(program: Program, analysis: Analysis) -> dict[str, int] | None:
    """The inputs that can mark samples, with the number that marks an ignored one. None if no sample can be ignored."""
    if program.mixes_batch is not None or program.loss_reduction != "sum":
        return None
    targets: dict[str, int] = {}
    readers: dict[str, set[fx.Node]] = {}
    sums = {phase: list(_sums_over_the_batch(program, analysis, phase)) for phase in ("main", "denominator")}
    if not sums["main"] or (program.denominators and not sums["denominator"]):
        return None
    for phase, nodes in sums.items():
        for call_index, node in nodes:
            masks = _counted(node) if phase == "denominator" else _masked(node)
            named = ((_input_of(program, call_index, mask), mask) for mask in masks)
            name, mask = next(((name, mask) for name, mask in named if name is not None), (None, None))
            if name is None or mask is None or targets.setdefault(name, mask.ignored) != mask.ignored:
                return None
            if mask.reader is not None:
                readers.setdefault(name, set()).add(mask.reader)
    return targets if all(_readers(program, name) <= known for name, known in readers.items()) else None


def _sums_over_the_batch(program: Program, analysis: Analysis, phase: str) -> Iterator[tuple[int, fx.Node]]:
    """The operators of a phase that reduce the batch axis, each with the index of its call."""
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


def _readers(program: Program, name: str) -> set[fx.Node]:
    """The operators that read a value or its views."""
    readers: set[fx.Node] = set()
    for call in program.calls:
        block = program.blocks[call.block]
        results = dict(zip(block.outputs, call.results, strict=True))
        ports = {port for port, argument in zip(block.ports, call.arguments, strict=True) if argument == name}
        views = {node for node in block.graph.nodes if node.op == "placeholder" and node.name in ports}
        for node in block.graph.nodes:
            if node.op == "output" or views.isdisjoint(node.all_input_nodes):
                continue
            if operator_name(node) not in _VIEWS:
                readers.add(node)
            else:
                views.add(node)
                if node.name in results:
                    readers |= _readers(program, results[node.name])
    return readers


def _masked(node: fx.Node) -> list[_Mask]:
    """The target of a summed cross-entropy, or the factors of a summed product."""
    if node.target is aten.cross_entropy_loss.default:
        return _target(node.args[TARGET], node.args[IGNORE_INDEX] if len(node.args) > IGNORE_INDEX else None)
    product = before(arg(node, 0), _VIEWS) if node.target in SUMS else None
    if product is None or product.target is not aten.mul.Tensor:
        return []
    return [_Mask(factor, WEIGHTLESS, product) for factor in product.args if isinstance(factor, fx.Node)]


def _counted(node: fx.Node) -> list[_Mask]:
    """The target of a count of targets that are not ignored, or the summed weights."""
    valid = node.args[0] if node.target in SUMS else None
    if not isinstance(valid, fx.Node):
        return []
    return _target(*valid.args) if valid.target is aten.ne.Scalar else [_Mask(valid, WEIGHTLESS, node)]


def _target(value: object, ignored: object) -> list[_Mask]:
    return [_Mask(value, ignored)] if isinstance(value, fx.Node) and isinstance(ignored, int) else []


def _input_of(program: Program, call_index: int, mask: _Mask) -> str | None:
    """The input with a batch dimension that a mask is a view of, or None. No floating one is a target."""
    node, ignored = mask.value, mask.ignored
    call: CallSite = program.calls[call_index]
    while True:
        while (node := before(node, _VIEWS)).op == "call_function":
            if node.target is not aten.constant_pad_nd.default or node.args[2] != ignored:
                return None
            node = arg(node, 0)
        ports = list(program.blocks[call.block].ports)
        name = call.arguments[ports.index(node.name)]
        if not isinstance(name, str):
            return None
        for info in program.inputs:
            if info.name == name:
                fits = mask.reader is not None or not info.dtype.is_floating_point
                return name if info.batch_dim is not None and fits else None
        maker = next((c for c in program.calls if name in c.results), None)
        if maker is None:
            return None
        call, node = maker, output_nodes(program.blocks[maker.block].graph)[maker.results.index(name)]
