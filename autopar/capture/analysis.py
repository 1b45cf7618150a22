"""Axis analysis of a folded program: union-find over the dimensions of all values in all distinct blocks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import fx

from autopar.capture.axes import Axes, Variable
from autopar.capture.nodes import output_nodes
from autopar.ir.program import Block, CallSite, Program
from autopar.ir.sharding import Dims, Mesh, owned_by, splits_samples
from autopar.rules.registry import rule_of
from autopar.rules.routed import ORDER, SORTED, UNTAKE
from autopar.rules.rule import Call, Rule, TensorInfo, whole_rule
from autopar.rules.variants import Bound

NodeName = str
_Operands = Mapping[NodeName, tuple[NodeName, ...]]
_Operators = tuple[Block, Mapping[NodeName, Rule], Mapping[NodeName, Call], _Operands]  # of a block


@dataclass(frozen=True, eq=False, kw_only=True)
class Analysis:
    """The dims of every value and the bound rule of every operator, per block. Calls have slots for operands."""

    graphs: tuple[fx.Graph, ...]  # of the program's blocks
    sites: tuple[CallSite, ...]
    dims: tuple[Mapping[NodeName, Dims], ...]
    bounds: tuple[Mapping[NodeName, Bound], ...]
    calls: tuple[Mapping[NodeName, Call], ...]
    operands: tuple[_Operands, ...]
    outer: Mapping[str, Dims]  # inputs, parameters, constants and values that cross blocks
    batch_axes: frozenset[int]
    sequence_axes: frozenset[int]
    hidden_axes: frozenset[int]
    # a refined axis, and the mesh dimension that may split it
    meant_for: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def orders(self) -> tuple[Mapping[NodeName, NodeName], ...]:
        """The order (`expert_order`) of the rows of every value of a block that has sorted rows."""
        orders: list[dict[NodeName, NodeName]] = []
        for calls, operands, ragged in zip(self.calls, self.operands, self.ragged, strict=True):
            of: dict[NodeName, NodeName] = {}
            for name, call in calls.items():
                known = [of[operand] for operand in operands[name] if operand in of]
                if call.target is ORDER:
                    of[name] = name
                elif known and name in ragged:
                    of[name] = known[0]
            orders.append(of)
        return tuple(orders)

    @cached_property
    def ragged(self) -> tuple[Mapping[NodeName, frozenset[int]], ...]:
        """The ragged dimensions of each block's values: rows in the order of a rank's tokens, never cut or joined."""
        if not any(call.target is ORDER for calls in self.calls for call in calls.values()):
            return tuple({} for _ in self.graphs)
        outer: dict[str, frozenset[int]] = {}
        ragged: list[dict[NodeName, frozenset[int]]] = [{} for _ in self.graphs]
        for site in self.sites:
            ports = [node.name for node in self.graphs[site.block].nodes if node.op == "placeholder"]
            given = {
                p: outer[a] for p, a in zip(ports, site.arguments, strict=True) if isinstance(a, str) and a in outer
            }
            ragged[site.block] = self._ragged_values(site.block, ragged[site.block] | given)
            names = [node.name for node in output_nodes(self.graphs[site.block])]
            results = zip(names, site.results, strict=True)
            outer |= {result: ragged[site.block][name] for name, result in results if name in ragged[site.block]}
        return tuple(ragged)

    def _ragged_values(self, block: int, known: Mapping[NodeName, frozenset[int]]) -> dict[NodeName, frozenset[int]]:
        """The ragged dimensions of a block's values if those of its ports are `known`."""
        ragged = dict(known)
        for name, bound in self.bounds[block].items():
            target, operands = self.calls[block][name].target, self.operands[block][name]
            if target in SORTED:
                ragged[name] = frozenset([0])
            elif target is not UNTAKE and any(operand in ragged for operand in operands):
                pairs = zip(operands, bound.rule.inputs, strict=True)
                factors = {f for operand, spec in pairs for dim in ragged.get(operand, ()) for f in spec[dim]}
                dims = frozenset(d for d, names in enumerate(bound.rule.output) if not factors.isdisjoint(names))
                if dims:
                    ragged[name] = dims
        return ragged


class _Unifier:
    """The state of one analysis: a variable for every dimension and every factor."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.axes = Axes()
        self.outer: dict[str, list[Variable]] = {}
        self.values: list[dict[NodeName, list[Variable]]] = [{} for _ in program.blocks]
        self.rules: list[dict[NodeName, Rule]] = [{} for _ in program.blocks]
        self.factors: list[dict[NodeName, dict[str, Variable]]] = [{} for _ in program.blocks]
        self.calls: list[dict[NodeName, Call]] = [{} for _ in program.blocks]
        self.operands: list[dict[NodeName, tuple[NodeName, ...]]] = [{} for _ in program.blocks]
        self.known: dict[object, Rule] = {}  # by call, because many calls are equal
        self.atoms_of: dict[Variable, tuple[tuple[int, int], ...]] = {}
        self.dims_of: dict[tuple[Variable, ...], Dims] = {}

    def variables(self, shape: Sequence[int]) -> list[Variable]:
        return [self.axes.new(size) for size in shape]

    def boundaries(self) -> None:
        """Join each port and each result of a block with the value that a call binds to it."""
        for i, block in enumerate(self.program.blocks):
            for node in block.graph.nodes:
                if "info" in node.meta:
                    self.values[i][node.name] = self.variables(node.meta["info"].shape)
        linked: set[tuple[Any, ...]] = set()
        for call in self.program.calls:
            block = self.program.blocks[call.block]
            pairs = [*zip(block.ports, call.arguments, strict=True)]
            pairs += zip(block.outputs, call.results, strict=True)
            for name, outer in pairs:
                if not isinstance(outer, str):
                    continue
                mine = self.values[call.block][name]
                known = self.outer.setdefault(outer, mine)
                link = (tuple(mine), tuple(known))
                if known is not mine and link not in linked:
                    linked.add(link)
                    assert all(self.axes.unify([a], [b]) for a, b in zip(known, mine, strict=True)), (outer, name)

    def node(self, i: int, node: fx.Node) -> None:
        call, operands = Call.of(node.target, node.args, node.kwargs, node.meta["info"], info_of)
        names = tuple(n.name for n in operands)
        values = [self.values[i][n] for n in names]
        rule = self.known.get(call.key) or self.known.setdefault(call.key, rule_of(call))
        factors = {f: self.axes.new(size) for f, size in rule.sizes.items()}
        if not self.bind(rule, factors, values, self.values[i][node.name]):
            rule = whole_rule(call)
            factors = {f: self.axes.new(size) for f, size in rule.sizes.items()}
            if node.name not in self.program.blocks[i].outputs:
                self.values[i][node.name] = self.variables(node.meta["info"].shape)
            assert self.bind(rule, factors, values, self.values[i][node.name]), (node, call)
        self.rules[i][node.name], self.factors[i][node.name] = rule, factors
        self.calls[i][node.name] = call
        self.operands[i][node.name] = names

    def bind(
        self, rule: Rule, factors: Mapping[str, Variable], inputs: Sequence[Sequence[Variable]], out: Sequence[Variable]
    ) -> bool:
        specs = (*zip(rule.inputs, inputs, strict=True), (rule.output, out))
        pairs = [pair for spec, dims in specs for pair in zip(spec, dims, strict=True)]
        return all(self.axes.unify([factors[f] for f in names], [dim]) for names, dim in pairs)

    def expert_atoms(self) -> set[int]:
        """The atoms of all axes of experts, before any is refined."""
        pairs = zip(self.program.blocks, self.rules, self.calls, self.operands, strict=True)
        return _of_experts(pairs, lambda i, node, factor: self.axes.atoms(self.factors[i][node][factor]))

    def atoms(self, variable: Variable) -> tuple[tuple[int, int], ...]:
        """The atoms of a variable with their sizes. Call this only after all variables are unified."""
        root = self.axes.root(variable)
        if root not in self.atoms_of:
            self.atoms_of[root] = tuple((a, self.axes.size(a)) for a in self.axes.atoms(root))
        return self.atoms_of[root]

    def dims(self, variables: Sequence[Variable]) -> Dims:
        """The dims of a value; equal dims are one object. Call this only after all variables are unified."""
        roots = tuple(self.axes.root(v) for v in variables)
        if roots not in self.dims_of:
            atoms = [self.atoms(root) for root in roots]
            sizes, axes = (tuple(tuple(pair[i] for pair in dim) for dim in atoms) for i in (1, 0))
            self.dims_of[roots] = Dims(sizes, axes)
        return self.dims_of[roots]


def info_of(value: Any) -> TensorInfo | None:
    """The shape and dtype of a node. None if the value is no node, or a number."""
    return value.meta.get("info") if isinstance(value, fx.Node) else None


def _rivals(mesh: Mesh) -> list[int]:
    """The mesh dimensions that compete for axes other than the batch. Empty if there is only one."""
    dims = [i for i in (*mesh.owning("parameters"), *mesh.owning("sequence")) if mesh.degrees[i] > 1]
    return dims if len(dims) > 1 else []


def _rivals_for_batch(mesh: Mesh) -> list[int]:
    """The mesh dimensions that split the batch. Empty if there is only one."""
    dims = [i for i, name in enumerate(mesh.names) if splits_samples(name) and mesh.degrees[i] > 1]
    return dims if len(dims) > 1 else []


def refining(mesh: Mesh) -> Mesh:
    """The mesh without the degrees that refine no axis: `analyse` has the same result for it."""
    rivals = _rivals(mesh)
    dims = {*rivals, *_rivals_for_batch(mesh), *(mesh.owning("experts") if rivals else ())}
    return Mesh(mesh.names, tuple(n if i in dims else 1 for i, n in enumerate(mesh.degrees)))


def _refinement(axes: Axes, atom: int, order: Sequence[int], mesh: Mesh, *, both: bool) -> dict[int, int]:
    """Split an atom into one part per mesh dimension of `order`, outermost first: the new atoms, each with its own."""
    parts, rest = list[int](), axes.size(atom)
    for i, following in pairwise(order):
        degree = mesh.degrees[i]
        # if not `both` degrees divide it, only one of the two may split it
        if rest % degree == 0 and (not both or (rest // degree) % mesh.degrees[following] == 0):
            parts.append(i)
            rest //= degree
    if not parts:
        return {}
    children = axes.split(atom, [*(mesh.degrees[i] for i in parts), rest])
    return dict(zip(children, [*parts, order[-1]], strict=True))


def analyse(program: Program, mesh: Mesh | None = None) -> Analysis:
    """The axes of a program, refined for a mesh until at most one mesh dimension splits each axis."""
    known = program.analysis
    refines = mesh is not None and (_rivals(mesh) or _rivals_for_batch(mesh))
    graphs = tuple(block.graph for block in program.blocks)
    if isinstance(known, Analysis) and known.sites is program.calls and known.graphs == graphs and not refines:
        return known
    state = _Unifier(program)
    state.boundaries()
    for i, block in enumerate(program.blocks):
        for node in block.operators:
            state.node(i, node)
    axes = state.axes
    inputs = [(state.outer[info.name], info) for info in program.inputs if info.name in state.outer]
    batches = [dims[info.batch_dim] for dims, info in inputs if info.batch_dim is not None]
    sequences = [dims[info.sequence_dim] for dims, info in inputs if info.sequence_dim is not None]
    meant_for: dict[int, int] = {}
    if mesh is not None:
        for atom in dict.fromkeys(axes.atoms(batches)):
            meant_for |= _refinement(axes, atom, _rivals_for_batch(mesh), mesh, both=False)
    batch = set(axes.atoms(batches))
    if mesh is not None and (rivals := _rivals(mesh)):
        owners = sorted(rivals, key=lambda i: owned_by(mesh.names[i]) != "sequence")
        every = {a for block in state.values for dims in block.values() for a in axes.atoms(dims)}
        split = set(axes.atoms(sequences))  # outermost by the ranks of `cp`, so that each has a contiguous part
        if any(mesh.degrees[i] > 1 for i in mesh.owning("experts")):
            every -= state.expert_atoms() - split  # `ep` splits them whole
        for atom in sorted(every - batch):
            meant_for |= _refinement(axes, atom, owners if atom in split else rivals, mesh, both=True)
    sequence = set(axes.atoms(sequences))
    crossing = {r for call in program.calls for r in call.results}
    hidden = {a for name in crossing for v in state.outer[name] for a in axes.atoms(v)} - batch - sequence
    zero_padded = list[set[NodeName]]()  # values whose padding is zero
    for block, rules, names in zip(program.blocks, state.rules, state.operands, strict=True):
        linear = {name for name, rule in rules.items() if rule.linear}
        zero_padded.append(_of_parameters(block, names, linear.__contains__))
    dims = tuple({n: state.dims(v) for n, v in block.items()} for block in state.values)
    bounds = tuple(
        {
            name: Bound(
                rule,
                {f: state.atoms(v) for f, v in state.factors[i][name].items()},
                tuple(dims[i][n] for n in state.operands[i][name]),
                dims[i][name],
                frozenset(k for k, n in enumerate(state.operands[i][name]) if n in zero_padded[i]),
            )
            for name, rule in rules.items()
        }
        for i, rules in enumerate(state.rules)
    )
    analysis = Analysis(
        graphs=tuple(block.graph for block in program.blocks),
        sites=program.calls,
        dims=dims,
        bounds=bounds,
        calls=tuple(state.calls),
        operands=tuple(state.operands),
        outer={name: state.dims(v) for name, v in state.outer.items()},
        batch_axes=frozenset(batch),
        sequence_axes=frozenset(sequence),
        hidden_axes=frozenset(hidden),
        meant_for=meant_for,
    )
    return replace(analysis, bounds=_with_ragged(analysis)) if any(analysis.ragged) else analysis


def expert_axes(program: Program, analysis: Analysis) -> frozenset[int]:
    """The axes of experts, without batch and sequence."""
    rules = ({name: bound.rule for name, bound in bounds.items()} for bounds in analysis.bounds)
    blocks = zip(program.blocks, rules, analysis.calls, analysis.operands, strict=True)
    axes = _of_experts(blocks, lambda i, node, factor: (a for a, _ in analysis.bounds[i][node].factors[factor]))
    return frozenset(axes) - analysis.batch_axes - analysis.sequence_axes


def _of_experts(blocks: Iterable[_Operators], axes_of: Callable[[int, NodeName, str], Iterable[int]]) -> set[int]:
    """The axes of factors of experts, without the axes of any other factor of their operators."""
    axes: dict[bool, set[int]] = {True: set(), False: set()}
    for i, block in enumerate(blocks):
        for node, factor, is_expert in _expert_factors(*block):
            axes[is_expert].update(axes_of(i, node, factor))
    return axes[True] - axes[False]


def _expert_factors(
    block: Block, rules: Mapping[NodeName, Rule], calls: Mapping[NodeName, Call], operands: _Operands
) -> Iterator[tuple[NodeName, str, bool]]:
    """Operators and their factors of experts (True): the matrices along such a factor meet rows of their own."""
    weights = _of_parameters(block, operands)
    for name, rule in rules.items():
        if rule.expert:
            yield name, rule.expert, True
        if rule.flops and len(rule.inputs) > 1 and not weights.isdisjoint(operands[name]):
            first, second, out = ({f for dim in spec for f in dim} for spec in (*rule.inputs[:2], rule.output))
            is_product = not str(calls[name].target).startswith("aten.conv")
            yield from (
                (name, f, f in out) for f in sorted((first & second) - rule.whole) if is_product or f not in out
            )


def parameter_values(program: Program, analysis: Analysis, block: int) -> set[str]:
    """Parameters of a block, and views and casts of them."""
    return _of_parameters(program.blocks[block], analysis.operands[block])


def _of_parameters(block: Block, operands: _Operands, which: Callable[[NodeName], bool] = bool) -> set[NodeName]:
    """Parameters of a block, and the results of `which` operators of such values alone."""
    known = {name for name, role in block.ports.items() if role == "parameter"}
    for node, names in operands.items():
        if names and which(node) and known.issuperset(names):
            known.add(node)
    return known


def _with_ragged(analysis: Analysis) -> tuple[Mapping[NodeName, Bound], ...]:
    """The bound rules with the ragged dimensions of their values."""
    with_rows: list[dict[NodeName, Bound]] = []
    for ragged, bounds, operands in zip(analysis.ragged, analysis.bounds, analysis.operands, strict=True):
        with_rows.append({})
        for name, bound in bounds.items():
            rows = tuple(ragged.get(value, frozenset()) for value in (*operands[name], name))
            with_rows[-1][name] = replace(bound, ragged=rows, known={}) if any(rows) else bound
    return tuple(with_rows)


def with_dims(program: Program, analysis: Analysis) -> Program:
    """The program with its axes written into its blocks."""
    blocks = tuple(replace(b, dims=d) for b, d in zip(program.blocks, analysis.dims, strict=True))
    return replace(
        program,
        blocks=blocks,
        batch_axes=analysis.batch_axes,
        sequence_axes=analysis.sequence_axes,
        hidden_axes=analysis.hidden_axes,
        analysis=analysis,
    )
