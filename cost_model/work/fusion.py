"""The data flow through a block: readers of every value, cuts by collectives, operators that fuse into one kernel.

*Layout* operators (views, reshapes that copy, expansions) make no numbers. A reader behind them reads the memory of the
operator before them, or the part that they select. The *depth* of an operator is the largest number of products,
attentions and collectives on a path to it. Fused groups are the connected sets of equal depth among all other
operators. A path that leaves a group leads to a greater depth, so that a group never waits for itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from torch import fx

from autopar.cost_model.work.autograd_probe import ATTENTION_NAME, NodeRun
from autopar.cost_model.work.conversion_steps import ConversionStep
from autopar.cost_model.work.operator_cost import VIEWS, target_name
from autopar.cost_model.work.polynomials import Expr
from autopar.cost_model.work.sizes import Naming, NodeSizes, Types
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block
from autopar.ir.sharding import Dims
from autopar.lowering.conversions import wire
from autopar.lowering.loss_region import LossRegion

_LAYOUT = VIEWS | {"clone", "contiguous", "to_copy"}
RANDOM = frozenset(["dropout", "native_dropout", "bernoulli", "feature_dropout", "alpha_dropout"])
Edge = tuple[str, int]  # (node, operand)


@dataclass(frozen=True, eq=False, kw_only=True)
class Flow:
    """A block under its labels.

    Training needs only the values in `outputs`. `runs` has the operators of these outputs. `regathered` has the edges
    whose operand is saved as a shard and gathered again, with the types of the shard. The operators of `region` run in
    `loss_chunks` chunks.
    """

    block: Block
    dims: Mapping[str, Dims]
    naming: Naming
    sizes: Mapping[str, NodeSizes]
    runs: Mapping[str, NodeRun]
    operands: Mapping[str, tuple[str, ...]]
    labels: BlockLabels
    steps: tuple[ConversionStep, ...]
    outputs: tuple[str, ...]
    regathered: Mapping[Edge, Types]
    nodes: Mapping[str, fx.Node] = field(default_factory=dict)
    region: LossRegion | None = None
    loss_chunks: int = 1

    @property
    def chunked(self) -> LossRegion | None:
        """The region, if it runs in several chunks."""
        return self.region if self.loss_chunks > 1 else None

    @property
    def roles(self) -> Mapping[str, str]:
        return self.block.ports

    @cached_property
    def operators(self) -> Mapping[str, str]:
        """The name of every operator without namespace and overload, such as ``linear``."""
        return {name: target_name(self.nodes[name].target) for name in self.sizes}

    @cached_property
    def layouts(self) -> frozenset[str]:
        return frozenset(n for n, run in self.runs.items() if self.operators[n] in _LAYOUT or run.owner != n)

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """The fused groups of operators between products and collectives, in the order of their first operators."""
        return _fused_groups(self)

    @cached_property
    def written(self) -> frozenset[str]:
        """Values made in a group that are read outside it."""
        readers = self.readers()
        group_of = {name: i for i, members in enumerate(self.groups) for name in members}
        return frozenset(
            name
            for name, i in group_of.items()
            if any(group_of.get(reader, -1) != i for reader, _ in readers.get(name, ()))
        )

    @cached_property
    def needs_of_groups(self) -> "list[set[Need]]":
        """The tensors that the backward pass of every group needs."""
        return [_needs_of_group(self, members, self.written) for members in self.groups]

    def info(self, name: str) -> Any:
        return self.nodes[name].meta["info"]

    def value_bytes(self, name: str) -> Expr:
        """Bytes of a value on one rank, in its producer's types."""
        return self.naming.local(self.dims[name], self.types(name)) * self.info(name).dtype.itemsize

    def types(self, name: str) -> Types:
        """Types in which a value is made."""
        return self.sizes[name].types(-1) if name in self.sizes else tuple(self.labels.ports[name])

    def use_types(self, edge: Edge) -> Types:
        """Types in which an operand is read."""
        return self.sizes[edge[0]].types(edge[1])

    def kept_types(self, edge: Edge) -> Types:
        """Types in which an operand is saved for the backward pass."""
        return self.regathered.get(edge) or self.use_types(edge)

    def is_product(self, name: str) -> bool:
        return name in self.sizes and (self.is_attention(name) or self.sizes[name].bound.rule.flops is not None)

    def is_attention(self, name: str) -> bool:
        return self.operators.get(name) == ATTENTION_NAME

    def is_eager(self, name: str) -> bool:
        return name in self.runs and not self.is_product(name) and name not in self.layouts

    def base(self, name: str) -> tuple[str, str]:
        """The value whose numbers a value shows, and the smallest value on the path to it, nearest to it."""
        smallest = name
        while name in self.layouts:
            name = self.operands[name][0]
            if prod(self.info(name).shape) <= prod(self.info(smallest).shape):
                smallest = name
        return name, smallest

    def is_given(self, name: str) -> bool:
        """Whether a value is a port that the block does not save for backward: a parameter, constant, id or mask."""
        return name in self.roles and (self.roles[name] != "value" or not self.info(name).differentiable)

    def readers(self) -> Mapping[str, list[Edge]]:
        """Every value that is not a layout of another, and the edges that read it."""
        readers: dict[str, list[Edge]] = {}
        for name in self.runs:
            if name not in self.layouts:
                for k, operand in enumerate(self.operands[name]):
                    readers.setdefault(self.base(operand)[0], []).append((name, k))
        for name in self.outputs:
            readers.setdefault(self.base(name)[0], []).append(("result", -1))
        return readers


def _sent_edges(block: Block, steps: tuple[ConversionStep, ...]) -> frozenset[Edge]:
    """Edges with a collective in the forward pass."""
    names = {node.meta["key"]: node.name for node in block.operators}
    edges = set()
    for step in steps:
        i = step.indices[0]
        if wire(step.before[i].kind, step.target[i].kind, True)[0]:
            edges |= {(names.get(user, "result"), k) for user, k in step.users}
    return frozenset(edges)


def _depths(flow: Flow) -> Mapping[str, int]:
    """The depth of every value."""
    sent = _sent_edges(flow.block, flow.steps)
    depths: dict[str, int] = {name: 0 for name in flow.nodes if name not in flow.runs}
    for name in flow.runs:
        over = (
            depths[operand] + flow.is_product(operand) + ((name, k) in sent)
            for k, operand in enumerate(flow.operands[name])
        )
        depths[name] = max(over, default=0)
    return depths


def _fused_groups(flow: Flow) -> list[tuple[str, ...]]:
    """See `Flow.groups`."""
    depth = _depths(flow)
    group: dict[str, str] = {name: name for name in flow.runs if flow.is_eager(name)}

    def find(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    for name in group:
        for operand in flow.operands[name]:
            base = flow.base(operand)[0]
            if base in group and depth[base] == depth[name]:
                first, second = find(base), find(name)
                group[second] = first
    groups: dict[str, list[str]] = {}
    for name in group:
        groups.setdefault(find(name), []).append(name)
    return [tuple(members) for members in groups.values()]


@dataclass(frozen=True, slots=True)
class Need:
    """A tensor saved for the backward pass: a value divided by some degrees, or an operator's own tensor."""

    value: str
    divisor: Expr
    inside: int = -1  # the position in `NodeRun.kept` of a tensor that is no value of the graph


def needs_of_product(flow: Flow, name: str) -> Iterator[Need]:
    """The tensors that a product or attention saves."""
    for position, kept in enumerate(flow.runs[name].kept):
        if kept.value is None:
            yield Need(name, flow.naming.divisor(flow.types(name)), position)
        elif kept.operand < 0:
            yield Need(name, flow.naming.divisor(flow.types(name)))
        else:
            base, smallest = flow.base(flow.operands[name][kept.operand])
            if not flow.is_given(base):
                yield Need(smallest, flow.naming.divisor(flow.kept_types((name, kept.operand))))


def _needs_of_group(flow: Flow, members: tuple[str, ...], written: frozenset[str]) -> set[Need]:
    """The tensors that the backward pass of a fused group needs.

    These are the tensors that its operators save. A value inside the group is not saved but computed again, from the
    group's inputs, the values that it writes (`written`) and random masks.
    """
    needs: set[Need] = set()
    inside, masked = set(members), set()

    def need(edge: Edge) -> None:
        base, smallest = flow.base(flow.operands[edge[0]][edge[1]])
        if base in inside and base not in written:
            compute(base)
        elif not flow.is_given(base):
            needs.add(Need(smallest, flow.naming.divisor(flow.use_types(edge))))

    def compute(name: str) -> None:
        if name in masked:
            return
        masked.add(name)
        mask(name)
        for k in range(len(flow.operands[name])):
            need((name, k))

    def mask(name: str) -> None:
        if flow.operators[name] in RANDOM:
            nth = (i for i, kept in enumerate(flow.runs[name].kept) if kept.value is None)
            needs.update(Need(name, flow.naming.divisor(flow.types(name)), i) for i in nth)

    for name in members:
        mask(name)
        for kept in flow.runs[name].kept:
            if kept.operand >= 0:
                need((name, kept.operand))
            elif kept.value is not None and name in written:
                needs.add(Need(name, flow.naming.divisor(flow.types(name))))
            elif flow.operators[name] not in RANDOM:
                compute(name)
    return needs
