"""What conversions between SPMD types send, and the list of all conversions that a labelling makes.

The table is that of the design, one row per conversion: the collective of the forward pass and that of the backward
pass, None where nothing goes over the wire.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.capture.analysis import Analysis
from autopar.cost_model.machine.collectives import Collective, sent_bytes
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block, Program
from autopar.ir.sharding import Dims, Kind, Mesh, Type, chunk, same, steps
from autopar.rules.variants import by_label, variants

Wire = tuple[Collective | None, Collective | None]
TABLE: Mapping[tuple[Kind, Kind], Wire] = {
    ("I", "R"): (None, "all_reduce"),
    ("P", "I"): ("all_reduce", None),
    ("P", "R"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("S", "I"): ("all_gather", None),
    ("I", "S"): (None, "all_gather"),
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("I", "P"): (None, None),
    ("S", "P"): (None, None),
    ("R", "I"): (None, None),
    ("R", "S"): (None, None),
    ("R", "P"): (None, None),
}


def wire(source: Type, target: Type, differentiable: bool) -> Wire:
    """The collectives of a conversion, forward and backward; without a cotangent nothing goes back."""
    if source == target:
        return None, None
    forward, backward = TABLE[source.kind, target.kind]
    return forward, backward if differentiable else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One conversion of one value on one mesh dimension inside a distinct block; `uses` names who wants it.

    `forward_bytes` and `backward_bytes` are what one rank sends for it in one call of the block.
    """

    block: int
    value: str
    role: str  # of the value: "node", or the role of its port
    mesh_dim: str
    source: Type
    target: Type
    forward: Collective | None
    backward: Collective | None
    forward_bytes: float
    backward_bytes: float
    uses: tuple[str, ...]
    calls: int

    @property
    def bytes(self) -> float:
        return self.forward_bytes + self.backward_bytes

    def __str__(self) -> str:
        sends = " and ".join(
            f"{name} {which}" for name, which in ((self.forward, "forward"), (self.backward, "backward")) if name
        )
        return f"{self.value}: {self.source} -> {self.target} on {self.mesh_dim} ({sends or 'nothing sent'})"


def conversions(program: Program, analysis: Analysis, labels: Sequence[BlockLabels], mesh: Mesh) -> list[Conversion]:
    """Every conversion that the generated blocks contain, in the order in which they are first needed.

    A conversion belongs to (value, destination types): uses that want the same types share it. Operators that only
    outputs dropped in training need are included.
    """
    found: list[Conversion] = []
    for index in range(len(program.blocks)):
        found += _of_block(program, analysis, labels[index], mesh, index)
    return found


def _padding(dims: Dims, source: Type, target: Type, degree: int) -> float:
    """By how much padding enlarges what a conversion sends: a shard is padded, what is not split is not."""
    factor = 1.0
    for t in (source, target):
        if t.kind == "S":
            size = dims.sizes[t.dim][t.position]
            factor *= chunk(size, degree) * degree / size
    return factor


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionStep:
    """One conversion of a value as code is generated for it: `before` are its types, `indices` the mesh dimensions that
    are converted together, `target` what its users want of it."""

    value: str
    before: tuple[Type, ...]
    indices: tuple[int, ...]
    target: tuple[Type, ...]
    users: tuple[tuple[str, int], ...]  # (node key, operand), or ("result", -1)


def conversion_steps(
    block: Block, analysis: Analysis, index: int, labels: BlockLabels, mesh: Mesh
) -> Iterator[ConversionStep]:
    """Every conversion inside a block under its labels, in the order in which values are defined."""
    types: dict[str, tuple[Type, ...]] = dict(labels.ports)
    wanted: dict[tuple[str, tuple[Type, ...]], list[tuple[str, int]]] = {}
    infos = {node.name: node.meta["info"] for node in block.graph.nodes if "info" in node.meta}

    def want(name: str, target: tuple[Type, ...], user: str, operand: int) -> None:
        pairs = zip(types[name], target, strict=True)
        target = tuple(s if same(s, t, infos[name].differentiable) else t for s, t in pairs)
        if target != types[name]:
            wanted.setdefault((name, target), []).append((user, operand))

    for node in block.graph.nodes:
        if node.op != "call_function":
            continue
        bound, key = analysis.bounds[index][node.name], node.meta["key"]
        pairs = zip(labels.labels[key], mesh.degrees, strict=True)
        chosen = [by_label(variants(bound, degree), label) for label, degree in pairs]
        for k, name in enumerate(analysis.operands[index][node.name]):
            want(name, tuple(v.operands[k] for v in chosen), key, k)
        types[node.name] = tuple(v.output for v in chosen)
    for name in block.outputs:
        want(name, labels.results[name], "result", -1)
    for (name, target), users in wanted.items():
        current = list(types[name])
        for indices in steps(analysis.dims[index][name], current, target, mesh):
            yield ConversionStep(value=name, before=tuple(current), indices=indices, target=target, users=tuple(users))
            for j in indices:
                current[j] = target[j]


def _of_block(
    program: Program, analysis: Analysis, labels: BlockLabels, mesh: Mesh, index: int
) -> Iterator[Conversion]:
    block = program.blocks[index]
    calls = len(program.uses_of_block(index))
    roles = {port.name: str(port.role) for port in block.ports}
    infos = {node.name: node.meta["info"] for node in block.graph.nodes if "info" in node.meta}
    for step in conversion_steps(block, analysis, index, labels, mesh):
        info, dims, i = infos[step.value], analysis.dims[index][step.value], step.indices[0]
        others = [t for j, t in enumerate(step.before) if j not in step.indices]
        degrees = [d for j, d in enumerate(mesh.degrees) if j not in step.indices]
        whole = float(info.dtype.itemsize)
        for sizes in dims.local_sizes(others, degrees):
            for size in sizes:
                whole *= size
        ranks = prod(mesh.degrees[j] for j in step.indices)
        if len(step.indices) == 1:  # joined shards are even
            whole *= _padding(dims, step.before[i], step.target[i], ranks)
        forward, backward = wire(step.before[i], step.target[i], info.differentiable)
        yield Conversion(
            block=index,
            value=step.value,
            role=roles.get(step.value, "node"),
            mesh_dim=mesh.names[i] if len(step.indices) == 1 else mesh.joined(i) or "",
            source=step.before[i],
            target=step.target[i],
            forward=forward,
            backward=backward,
            forward_bytes=sent_bytes(forward, whole, ranks) if forward else 0.0,
            backward_bytes=sent_bytes(backward, whole, ranks) if backward else 0.0,
            uses=tuple(user for user, _ in step.users),
            calls=calls,
        )
