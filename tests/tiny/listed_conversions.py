"""All conversions of a labelling with the collectives and bytes of each, from the labels alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from autopar.capture.analysis import Analysis
from autopar.cost_model.machine.collectives import sent_bytes
from autopar.cost_model.work.conversion_steps import conversion_steps
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, Mesh, Type, chunk
from autopar.lowering.conversions import Collective, wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedConversion:
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


def listed_conversions(
    program: Program, analysis: Analysis, labels: Sequence[BlockLabels], mesh: Mesh
) -> list[ListedConversion]:
    """Every conversion that the generated blocks contain, in the order in which they are first needed.

    A conversion belongs to (value, destination types): uses that want the same types share it. Operators that only
    outputs dropped in training need are included.
    """
    found: list[ListedConversion] = []
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


def _of_block(
    program: Program, analysis: Analysis, labels: BlockLabels, mesh: Mesh, index: int
) -> Iterator[ListedConversion]:
    block = program.blocks[index]
    calls = len(program.uses_of_block(index))
    roles = dict(block.ports)
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
        forward, backward = wire(step.before[i].kind, step.target[i].kind, info.differentiable)
        yield ListedConversion(
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
