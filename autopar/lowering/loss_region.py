"""The region of a block that may run in chunks of tokens: the head's product, then the sum of cross-entropies.

    linear -> pointwise operators of one operand (casts, scales, a soft cap) -> views -> sum of cross-entropies

A region has no conversion inside, and nothing else reads its values. `region_of_block` finds it in the captured block
under labels, for the generated code and for its price. `autopar.lowering.loss_chunks` runs it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.analysis import Analysis
from autopar.capture.nodes import argument, closure, output_nodes
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block, Program
from autopar.ir.sharding import Mesh, same
from autopar.ir.stages import needed_results
from autopar.rules.variants import Variant, chosen_variants

_LINEAR = aten.linear.default
LOSS = aten.cross_entropy_loss.default
CASTS = (aten.to.dtype,)
_VIEWS = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)
NO_LOSS = "the model has no cross-entropy"
_SUM = 2  # the reduction of the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRegion:
    """The captured operators of a region by name: the product, the operators behind it in their order, the loss."""

    linear: str
    between: tuple[str, ...]
    loss: str

    @property
    def inside(self) -> frozenset[str]:
        """The values that exist in chunks only."""
        return frozenset((self.linear, *self.between))


def region_of_block(
    analysis: Analysis, block: Block, index: int, labels: BlockLabels, mesh: Mesh, keep: Collection[str]
) -> LossRegion | str:
    """The region of a block under labels, or why it has none; `keep` names the outputs that are needed."""
    needed = set(closure([node for node in output_nodes(block.graph) if node.name in keep]))
    nodes = {node.name: node for node in block.graph.nodes if node.op == "call_function" and node in needed}
    if not any(node.target is LOSS for node in nodes.values()):
        return NO_LOSS
    chosen = {
        name: chosen_variants(analysis.bounds[index][name], labels.labels[node.meta["key"]], mesh.degrees)
        for name, node in nodes.items()
    }
    regions = [_region(loss, nodes, keep, chosen) for loss in nodes.values() if loss.target is LOSS]
    return next((region for region in regions if isinstance(region, LossRegion)), regions[0])


def why_whole(program: Program, analysis: Analysis, labels: Sequence[BlockLabels], mesh: Mesh) -> str | None:
    """Why the logits of a program exist whole, whatever the number of chunks. None if they can run in chunks."""
    kept = needed_results(program)
    regions = [region_of_block(analysis, block, i, labels[i], mesh, kept[i]) for i, block in enumerate(program.blocks)]
    reasons = [r for r in regions if isinstance(r, str)]
    if len(reasons) < len(regions):
        return None
    return next((reason for reason in reasons if reason != NO_LOSS), NO_LOSS)


def _region(
    loss: fx.Node, nodes: Mapping[str, fx.Node], outputs: Collection[str], chosen: Mapping[str, Sequence[Variant]]
) -> LossRegion | str:
    weight, reduction, smoothing = (argument(loss, name) for name in ("weight", "reduction", "label_smoothing"))
    logits, target = loss.args[0], loss.args[1]
    assert isinstance(logits, fx.Node) and isinstance(target, fx.Node)
    if reduction != _SUM:
        return "its cross-entropy is no sum over tokens"
    if weight is not None or smoothing:
        return f"its cross-entropy has {'weights of classes' if weight is not None else 'label smoothing'}"
    if target.meta["info"].dtype.is_floating_point or len(logits.meta["info"].shape) != 2:
        return "its targets are no classes of tokens"
    between: list[str] = []
    reader, value = loss, logits
    while True:
        others = [user for user in value.users if user.name in nodes and user is not reader]
        if others or value.name in outputs:
            return f"{_called(value)} is needed {'by ' + _called(others[0]) if others else 'as a result'} too"
        if value.op != "call_function":
            return f"{_called(reader)} reads a value of another block"
        pairs = zip(chosen[value.name], chosen[reader.name], strict=True)
        if not all(same(made.output, read.operands[0], True) for made, read in pairs):
            return f"{_called(value)} is converted before {_called(reader)} reads it"
        if value.target is _LINEAR:
            if any(variant.output.kind == "P" for variant in chosen[value.name]):
                return f"{_called(value)} is a partial sum"
            return LossRegion(linear=value.name, between=tuple(reversed(between)), loss=loss.name)
        if not (is_chain(value) or _merges_tokens(value)):
            return f"{_called(value)} is no operator on single elements"
        between.append(value.name)
        reader, source = value, value.args[0]
        assert isinstance(source, fx.Node)
        value = source


def is_chain(node: fx.Node) -> bool:
    """Whether an operator computes each element of its first operand alone, with numbers as its other arguments."""
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags or node.target in CASTS
    alone = len(node.all_input_nodes) == 1 and isinstance(node.args[0], fx.Node)
    return pointwise and alone and torch.Tag.nondeterministic_seeded not in tags


def _merges_tokens(node: fx.Node) -> bool:
    """Whether a view keeps the last dimension, so that it only numbers tokens in another way."""
    if node.target not in _VIEWS:
        return False
    before = node.all_input_nodes[0].meta["info"].shape
    return bool(before) and before[-1] == node.meta["info"].shape[-1]


def chain_steps(chain: Iterable[fx.Node]) -> Iterator[tuple[Any, ...]]:
    """The operators of a chain with their numbers, as `autopar.lowering.loss_chunks` takes them. Views are left out."""
    for node in chain:
        if node.target not in _VIEWS:
            yield (node.target, *node.args[1:], *([dict(node.kwargs)] if node.kwargs else []))


def _called(node: fx.Node) -> str:
    return str(node.meta.get("key", node.name))
