"""One block as a graph to look at: products, attention and collectives of the forward pass, the rest in groups.

The drawing uses the generated graph (`autopar.lowering.local_graph`), so it shows the code that runs. All other
operators between products, attention and collectives become one node for each module and connected piece. A conversion
that sends nothing in the forward pass is no node.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.capture.analysis import Analysis, analyse
from autopar.capture.nodes import operator_name
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.lowering.conversions import BY_FUNCTION
from autopar.lowering.local_graph import local_graph
from autopar.report.explain import placed
from autopar.search.result.report_data import BlockGraph, GraphEdge, GraphNode

# by the name of a conversion's function, of conversions that send something forward
_COLLECTIVES = {name: row.wire[0].replace("_", "-") for name, row in BY_FUNCTION.items() if row.wire[0] is not None}
_PRODUCTS = (
    *("linear", "mm", "bmm", "addmm", "matmul", "baddbmm", "_grouped_mm", "grouped_mm", "expert_product"),
    *("convolution", "einsum"),
)
MOST_WORDS = 4  # operators of a group that are named
MOST_NODES = 120  # of a drawing that can be read


def block_graph(program: Program, plan: Plan) -> BlockGraph | None:
    """The block that is called most, of those the one with most operators; None where it is too large to be read."""
    read = analyse(program, plan.mesh)
    calls = [len(program.uses_of_block(i)) for i in range(len(program.blocks))]
    index = max(range(len(calls)), key=lambda i: (calls[i], len(read.bounds[i])))
    drawn = _Drawing(program, plan, read, index)
    if len(drawn.groups) > MOST_NODES:
        return None
    return BlockGraph(
        name=program.blocks[index].name,
        num_calls=calls[index],
        nodes=tuple(drawn.nodes()),
        edges=tuple(drawn.edges()),
        weights=tuple(drawn.weights()),
    )


@dataclass(eq=False, slots=True)
class _Group:
    """Nodes that are one box: `members`, and in order the nodes of other boxes that feed them."""

    kind: str
    module: str
    members: list[fx.Node] = field(default_factory=list)
    sources: list[fx.Node] = field(default_factory=list)


class _Drawing:
    """A generated block and what its nodes are called."""

    def __init__(self, program: Program, plan: Plan, analysis: Analysis, index: int) -> None:
        self.program, self.plan, self.index = program, plan, index
        self.block, self.dims, self.analysis = program.blocks[index], analysis.dims[index], analysis
        labels = plan.blocks[index]
        self.graph = local_graph(analysis, self.block, index, labels, plan.mesh).graph
        self.keys: Mapping[str, str] = {n.name: str(n.meta.get("key", "")) for n in self.block.graph.nodes}
        self.values = {name for name, role in self.block.ports.items() if role in ("value", "input")}
        self.flowing: set[fx.Node] = set()  # what depends on a value, not on weights and constants alone
        for node in self.graph.nodes:
            if node.name in self.values or not self.flowing.isdisjoint(node.all_input_nodes):
                self.flowing.add(node)
        self.groups: list[_Group] = []  # in the order of the graph
        self.of: dict[fx.Node, _Group] = {}
        for node in self.graph.nodes:
            if kind := self._kind(node):
                self._add(node, kind)

    # ---- nodes into groups ----

    def _add(self, node: fx.Node, kind: str) -> None:
        sources = self._sources(node)
        group = self._joined(node, [self.of[source] for source in sources]) if kind == "other" else None
        if group is None:
            group = _Group(kind, self._module(node))
            self.groups.append(group)
        group.members.append(node)
        group.sources += [source for source in sources if self.of[source] is not group]
        self.of[node] = group

    def _kind(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return "input" if node.name in self.values else ""
        if node.op == "output":
            return "output"
        if node.op != "call_function" or node not in self.flowing:
            return ""
        name = operator_name(node)
        if name in _COLLECTIVES:
            return "collective"
        if node.name not in self.keys:
            return ""  # a conversion that sends nothing
        if "attention" in name:
            return "attention"
        return "product" if name in _PRODUCTS else "other"

    def _module(self, node: fx.Node) -> str:
        return self.keys.get(node.name, "").rsplit(":", 2)[0] if self.keys.get(node.name, "").count(":") >= 2 else ""

    def _joined(self, node: fx.Node, feeding: list[_Group]) -> _Group | None:
        """A group of the same module that feeds the node, and does not reach it through another group."""
        for group in feeding:
            is_alike = group.kind == "other" and group.module == self._module(node)
            if is_alike and not any(self._reaches(group, other) for other in feeding if other is not group):
                return group
        return None

    def _reaches(self, start: _Group, end: _Group) -> bool:
        reached = [end]
        for group in reached:  # it grows
            reached += {self.of[source]: None for source in group.sources if self.of[source] not in reached}
        return start in reached

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """What feeds a node, conversions that send nothing passed through."""
        sources: list[fx.Node] = []
        for source in node.all_input_nodes:
            if self._kind(source):
                sources.append(source)
            elif source.op == "call_function":
                sources += self._sources(source)
        return sources

    # ---- groups into what is drawn ----

    def nodes(self) -> Iterable[GraphNode]:
        layers: dict[_Group, int] = {}

        def layer_of(group: _Group) -> int:
            if group not in layers:
                layers[group] = 1 + max((layer_of(self.of[source]) for source in group.sources), default=-1)
            return layers[group]

        for group in self.groups:
            label, detail = self._texts(group)
            name, layer = group.members[0].name, layer_of(group)
            yield GraphNode(name=name, kind=group.kind, label=label, detail=detail, layer=layer)

    def edges(self) -> Iterable[GraphEdge]:
        numbers = {group: number for number, group in enumerate(self.groups)}
        every = [
            GraphEdge(source=numbers[self.of[source]], target=target, placement=self._placement(source))
            for group, target in numbers.items()
            for source in group.sources
        ]
        return dict.fromkeys(every)

    def weights(self) -> Iterable[tuple[str, str, str]]:
        """Parameters of the block: name, shape, split."""
        for port, role in self.block.ports.items():
            if role == "parameter":
                shape = " × ".join(f"{size:,}" for size in self.dims[port].shape) or "scalar"
                types = zip(self.plan.mesh.as_dict().items(), self.plan.blocks[self.index].ports[port], strict=True)
                split = [
                    f"dimension {t.dim} over {n} {degree}" for (n, degree), t in types if t.kind == "S" and degree > 1
                ]
                yield port, shape, ", ".join(split) or "whole"

    def _texts(self, group: _Group) -> tuple[str, str]:
        """The label of a box and what stands below it."""
        names = [operator_name(node) for node in group.members]
        if group.kind == "collective":
            dim = group.members[0].args[1]
            over = str(dim.target) if isinstance(dim, fx.Node) else str(dim)
            return f"{_COLLECTIVES[names[0]]} over {over}", f"{self.plan.mesh.degree_of(over)} ranks"
        if group.kind in ("input", "output"):
            return group.kind, ""
        label = "attention" if group.kind == "attention" else group.module
        label = label or ", ".join(dict.fromkeys(names[:MOST_WORDS]))
        every = list(dict.fromkeys(names))
        if every == [label]:
            return label, ""
        shown = ", ".join(every[:MOST_WORDS]) + (", …" if len(every) > MOST_WORDS else "")
        return label, shown if len(names) == 1 else f"{len(names)} operators: {shown}"

    def _placement(self, node: fx.Node) -> str:
        """The placement of a node's value on the ranks."""
        source: fx.Node = node
        while source.name not in self.dims and source.all_input_nodes:
            source = source.all_input_nodes[0]
        types = node.meta.get("types")
        if types is None or source.name not in self.dims:
            return ""
        return placed(self.analysis, self.dims[source.name], types, self.plan)
