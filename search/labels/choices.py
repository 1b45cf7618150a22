"""What the labeller chooses on one mesh dimension, and the axes that the dimension may split.

All values that are bound to the same port, or leave a block by the same result, must have one type. They form a
*boundary class*. This covers tied parameters and the shared ports of layers.

A mesh dimension owns axes (`autopar.ir.sharding.owned_by`). `dp` owns the batch axes. `ep` owns a part of them, and the
axes of experts. Every other mesh dimension owns
the other axes that no earlier one has split. `tp` owns the sequence axes only if sequence parallelism is allowed. It
owns the hidden axes of the residual stream only if much work stays whole without them, because they tie with better
choices and slow the proof. `cp` never owns these hidden axes: values between blocks are split along the sequence. No
axis is split twice, so conversions on different mesh dimensions commute.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar._torch.operators import aten
from autopar.capture.analysis import Analysis, expert_axes
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, Mesh, Type, chunk, owned_by, splits_samples
from autopar.rules.variants import Variant

NodeKey = tuple[int, str]  # (block, node)
ATTENTION = aten.scaled_dot_product_attention.default
MAX_PADDED = 1.25  # a padded axis over its own size; beyond, a rank may compute mostly padding


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryClass:
    """Outer names that share one type.

    `free` marks outputs that no block uses. Training drops them, so every type is right. `shared` marks values that
    several calls read at one port, such as an encoder's output in every decoder layer. One conversion for all calls is
    better than one per call. Therefore sequence parallelism does not ask for a shard of them.
    """

    name: str
    members: tuple[str, ...]
    role: str
    dims: Dims
    differentiable: bool
    itemsize: int
    fixed: bool  # loss, denominator, new values of buffers: invariant on every mesh dimension
    free: bool
    consumed: bool
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """All boundary classes, and the class of every port and result."""

    classes: Mapping[str, BoundaryClass]
    ports: Mapping[NodeKey, str]
    results: Mapping[NodeKey, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The choice on one mesh dimension: a variant for every operator, a type for every boundary class."""

    index: int
    name: str
    degree: int
    variants: Mapping[NodeKey, Variant]
    types: Mapping[str, Type]

    def type_of(self, boundary: Boundary, key: NodeKey) -> Type:
        """The type in which a value is made, by its operator or by the value that is bound to its port."""
        return self.variants[key].output if key in self.variants else self.types[boundary.ports[key]]


def boundary_of(program: Program, analysis: Analysis) -> Boundary:
    """Union-find over outer names, linked where calls bind them to one port or result."""
    parent: dict[str, str] = {}
    first: dict[NodeKey, str] = {}
    roles: dict[str, str] = {}
    infos = [{n.name: n.meta["info"] for n in b.graph.nodes if "info" in n.meta} for b in program.blocks]
    results = {r for c in program.calls for r in c.results}
    readers: Counter[tuple[int, str, str]] = Counter()

    def find(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for call in program.calls:
        block = program.blocks[call.block]
        for (port, role), argument in zip(block.ports.items(), call.arguments, strict=True):
            if isinstance(argument, str) and role != "scalar":
                link = call.block, port, argument
                roles[argument] = role
                readers[link] += 1
                if readers[link] == 1:
                    parent[find(argument)] = find(first.setdefault(link[:2], argument))
        for name, result in zip(block.outputs, call.results, strict=True):
            parent[find(result)] = find(first.setdefault((call.block, name), result))
    groups: dict[str, list[str]] = defaultdict(list)
    for name in parent:
        groups[find(name)].append(name)
    keys: dict[str, list[NodeKey]] = defaultdict(list)
    for key, name in first.items():
        keys[find(name)].append(key)
    fixed, outputs = program.invariant, set(program.outputs.values())
    consumed = {argument for _, _, argument in readers}
    shared = {argument for (_, _, argument), count in readers.items() if count > 1}
    classes = {}
    for root, members in groups.items():
        used = not consumed.isdisjoint(members)
        met = [infos[b][n] for b, n in keys[root]]
        classes[root] = BoundaryClass(
            name=root,
            members=tuple(members),
            role="value" if not results.isdisjoint(members) else next(roles[m] for m in members if m in roles),
            dims=analysis.outer[members[0]],
            differentiable=any(info.differentiable for info in met),
            itemsize=met[0].dtype.itemsize,
            fixed=not fixed.isdisjoint(members),
            free=not used and fixed.isdisjoint(members) and not outputs.isdisjoint(members),
            consumed=used,
            shared=not shared.isdisjoint(members),
        )
    ports = {(i, port) for i, b in enumerate(program.blocks) for port in b.ports}
    return Boundary(
        classes=classes,
        ports={key: find(name) for key, name in first.items() if key in ports},
        results={key: find(name) for key, name in first.items() if key not in ports},
    )


def owned_axes(
    program: Program,
    analysis: Analysis,
    boundary: Boundary,
    mesh: Mesh,
    index: int,
    solved: list[Choice],
    sequence: bool | None,
    hidden: bool,
) -> frozenset[int]:
    """The axes that mesh dimension `index` may split."""
    owned = owned_by(mesh.names[index])
    if splits_samples(mesh.names[index]):
        batch = frozenset(axis for axis in analysis.batch_axes if analysis.meant_for.get(axis, index) == index)
        return batch | (expert_axes(program, analysis) if owned == "experts" else frozenset())
    taken = analysis.batch_axes | {axis for axis, other in analysis.meant_for.items() if other != index}
    if owned == "parameters" and sequence is False:
        taken |= analysis.sequence_axes
    if not hidden:
        taken |= residual_axes(analysis, boundary)
    for earlier in solved:
        taken |= split_axes(analysis, boundary, earlier)
    return all_axes(analysis) - taken


def num_experts(program: Program, analysis: Analysis) -> tuple[int, ...]:
    """The numbers of experts of a program's mixtures, in order; () if it has none."""
    axes = expert_axes(program, analysis)
    bounds = (bound for block in analysis.bounds for bound in block.values())
    return tuple(
        sorted({size for bound in bounds for atoms in bound.factors.values() for a, size in atoms if a in axes})
    )


def is_paddable(size: int, degree: int) -> bool:
    """Whether equal parts leave every rank some elements, and not too much padding."""
    held = chunk(size, degree)
    return size % degree != 0 and (degree - 1) * held < size and degree * held <= MAX_PADDED * size


def paddable_axes(program: Program, analysis: Analysis, degree: int) -> frozenset[int]:
    """Heads, widths and vocabularies of parameters that may be split unevenly: the last ranks hold zeros."""
    pairs: set[tuple[int, int]] = set()
    for dims in {analysis.outer[name] for name in program.parameters}:
        for axes, sizes in zip(dims.axes, dims.sizes, strict=True):
            pairs.update(zip(axes, sizes, strict=True))
    axes_of = frozenset(axis for axis, size in pairs if is_paddable(size, degree))
    return axes_of - analysis.batch_axes - analysis.sequence_axes


def all_axes(analysis: Analysis) -> frozenset[int]:
    bounds = (bound for block in analysis.bounds for bound in block.values())
    inner = {axis for bound in bounds for atoms in bound.factors.values() for axis, _ in atoms}
    return frozenset(inner | {axis for dims in analysis.outer.values() for dim in dims.axes for axis in dim})


def residual_axes(analysis: Analysis, boundary: Boundary) -> set[int]:
    """Axes of the values between blocks, without batch and sequence."""
    crossing = [c for c in boundary.classes.values() if c.role == "value" and c.consumed]
    axes_of = {axis for c in crossing for dim in c.dims.axes for axis in dim}
    return axes_of - analysis.batch_axes - analysis.sequence_axes


def split_axes(analysis: Analysis, boundary: Boundary, solved: Choice) -> set[int]:
    """Axes that a mesh dimension splits at any operator."""
    axes = set()
    for (block, node), variant in solved.variants.items():
        if variant.factor:
            axes.add(analysis.bounds[block][node].factors[variant.factor][variant.axis][0])
    for name, chosen in solved.types.items():
        if chosen.kind == "S":
            axes.add(boundary.classes[name].dims.axes[chosen.dim][chosen.position])
    return axes


def share_of(solved: Sequence[Choice], boundary: Boundary, key: NodeKey) -> float:
    """The fraction of a value that one rank holds under the mesh dimensions that are already labelled."""
    kinds = ((s.type_of(boundary, key), s.degree) for s in solved)
    return 1 / prod(degree for kind, degree in kinds if kind.kind == "S")
