"""The conversions inside a block under its labels."""

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.capture.analysis import Analysis
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block
from autopar.ir.sharding import Mesh, Type, same, steps
from autopar.rules.variants import chosen_variants


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionStep:
    """One conversion of a value, as in the generated code."""

    value: str
    before: tuple[Type, ...]  # the value's types
    indices: tuple[int, ...]  # mesh dimensions that are converted together
    target: tuple[Type, ...]  # the types that its users take
    users: tuple[tuple[str, int], ...]  # (node key, operand), or ("result", -1)

    @property
    def is_last(self) -> bool:
        """Whether users take the value as this step leaves it. Products are fused with no other gather."""
        return all(self.before[j] == t for j, t in enumerate(self.target) if j not in self.indices)

    @property
    def is_gather(self) -> bool:
        """Whether users take the whole of a split value from this step."""
        i = self.indices[0]
        return self.is_last and (self.before[i].kind, self.target[i].kind) == ("S", "R")


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

    for node in block.operators:
        bound, key = analysis.bounds[index][node.name], node.meta["key"]
        chosen = chosen_variants(bound, labels.labels[key], mesh.degrees)
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
