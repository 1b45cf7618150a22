"""Random labels: every operator of a program labelled at random, to find wrong rules and conversions."""

import random
from collections.abc import Callable

from autopar.capture.analysis import Analysis
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, I, Mesh, R, S, Type
from autopar.rules.variants import Bound, Variant, rewrites_fit, variants

Owned = Callable[[int], bool]


def random_type(dims: Dims, chooser: random.Random, owned: Owned) -> Type:
    """A random legal type of a value that crosses blocks; only axes that the mesh dimension owns are split."""
    choices = [I, R]
    choices += [S(d, p) for d, sizes in enumerate(dims.sizes) for p in range(len(sizes)) if owned(dims.axes[d][p])]
    return chooser.choice(choices)


def random_owners(mesh: Mesh, seed: int) -> tuple[Owned, ...]:
    """Each axis is owned by one mesh dimension, so that conversions need no order."""

    def owner(axis: int) -> int:
        return random.Random(seed * 1_000_003 + axis).randrange(len(mesh.degrees))

    return tuple(lambda axis, k=k: owner(axis) == k for k in range(len(mesh.degrees)))


def random_labels(program: Program, analysis: Analysis, mesh: Mesh, seed: int) -> tuple[BlockLabels, ...]:
    """Labels drawn at random for every operator, parameter and value that crosses blocks."""
    chooser = random.Random(seed)
    owners = random_owners(mesh, seed)
    outer: dict[str, tuple[Type, ...]] = {}

    def outer_types(name: str) -> tuple[Type, ...]:
        if name not in outer:
            dims = analysis.outer[name]
            outer[name] = tuple(random_type(dims, chooser, owned) for owned in owners)
        return outer[name]

    classes = _boundary_classes(program)
    for name in (*sorted(program.invariant), *program.updates):
        outer[classes.get(name, name)] = (I,) * len(mesh.degrees)
    found: dict[int, BlockLabels] = {}
    for call in program.calls:
        if call.block in found:
            continue
        block = program.blocks[call.block]
        arguments = zip(block.ports, call.arguments, strict=True)
        ports = {p: outer_types(classes.get(a, a)) for p, a in arguments if isinstance(a, str)}
        results = {o: outer_types(classes.get(r, r)) for o, r in zip(block.outputs, call.results, strict=True)}
        labels = {}
        for node in block.graph.nodes:
            if node.op == "call_function":
                labels[node.meta["key"]] = _random_label(analysis.bounds[call.block][node.name], mesh, chooser, owners)
        found[call.block] = BlockLabels(
            name=block.name, signature=block.signature, ports=ports, labels=labels, results=results
        )
    return tuple(found[i] for i in range(len(program.blocks)))


def _boundary_classes(program: Program) -> dict[str, str]:
    """Values bound to the same port share a type: the representative of each name's class."""
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    first: dict[tuple[int, str], str] = {}
    for call in program.calls:
        block = program.blocks[call.block]
        pairs = [(p, a) for p, a in zip(block.ports, call.arguments, strict=True) if isinstance(a, str)]
        for port, name in [*pairs, *zip(block.outputs, call.results, strict=True)]:
            known = first.setdefault((call.block, port), name)
            parent[find(name)] = find(known)
    return {name: find(name) for name in list(parent)}


def _random_label(bound: Bound, mesh: Mesh, chooser: random.Random, owners: tuple[Owned, ...]) -> tuple[str, ...]:
    chosen: list[Variant] = []
    for degree, owned in zip(mesh.degrees, owners, strict=True):
        degrees = mesh.degrees[: len(chosen) + 1]
        legal = [
            v for v in variants(bound, degree) if _legal(v, bound, owned) and rewrites_fit(bound, [*chosen, v], degrees)
        ]
        split = [v for v in legal if v.factor]
        chosen.append(chooser.choice(split if split and chooser.random() < 0.8 else legal))
    return tuple(v.label for v in chosen)


def _legal(variant: Variant, bound: Bound, owned: Owned) -> bool:
    """Only owned axes are split."""
    return not variant.factor or owned(bound.factors[variant.factor][variant.axis][0])
