"""Random labels: every operator of a program labelled at random, to find wrong rules and conversions."""

import random
from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

from autopar.capture.analysis import Analysis
from autopar.capture.request import Inputs, LossFunction, Request
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block, Program
from autopar.ir.sharding import Dims, I, Mesh, R, S, Type
from autopar.rules.routed import ORDER
from autopar.rules.variants import Bound, Variant, rewrites_fit, variants
from autopar.testing.equivalence import Equivalence, compare_runs, run_labels, run_model

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
    for name in (*sorted(program.invariant), *program.updates, *_ragged_between_blocks(program, analysis)):
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
        rows = _axes_of_rows(block, analysis, call.block, mesh, chooser, owners)
        for node in block.operators:
            bound = analysis.bounds[call.block][node.name]
            fits = partial(_fits_rows, analysis, call.block, node.name, rows.get(node.name))
            labels[node.meta["key"]] = _random_label(bound, mesh, chooser, owners, fits)
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


def _random_label(
    bound: Bound, mesh: Mesh, chooser: random.Random, owners: tuple[Owned, ...], fits: Callable[[int, Variant], bool]
) -> tuple[str, ...]:
    chosen: list[Variant] = []
    for index, (degree, owned) in enumerate(zip(mesh.degrees, owners, strict=True)):
        degrees = mesh.degrees[: len(chosen) + 1]
        legal = [
            v
            for v in variants(bound, degree)
            if _legal(v, bound, owned)
            and not v.is_by_expert
            and rewrites_fit(bound, [*chosen, v], degrees)
            and fits(index, v)
        ]
        split = [v for v in legal if v.factor]
        chosen.append(chooser.choice(split if split and chooser.random() < 0.8 else legal))
    return tuple(v.label for v in chosen)


def _legal(variant: Variant, bound: Bound, owned: Owned) -> bool:
    """Only owned axes are split."""
    return not variant.factor or owned(bound.factors[variant.factor][variant.axis][0])


# ---- rows in the order of a rank's own tokens ----

_Rows = tuple[int | None, ...]  # the axis by which rows are split, per mesh dimension


def _axes_of_rows(
    block: Block, analysis: Analysis, index: int, mesh: Mesh, chooser: random.Random, owners: tuple[Owned, ...]
) -> dict[str, _Rows]:
    """How the operators that touch sorted rows split them. All operators of one order must do it alike."""
    ragged, bounds, operands = analysis.ragged[index], analysis.bounds[index], analysis.operands[index]
    order_of: dict[str, str] = {}
    for name in bounds:
        orders = [order_of[operand] for operand in operands[name] if operand in ragged and operand in order_of]
        if analysis.calls[index][name].target is ORDER:
            order_of[name] = name
        elif orders:
            order_of[name] = orders[0]
    crossing = {order_of.get(name) for name in (*block.ports, *block.outputs) if name in ragged}
    found: dict[str, list[int | None]] = {}
    for order in dict.fromkeys(order_of.values()):
        found[order] = []
        members = [name for name, its in order_of.items() if its == order]
        for at, (degree, owned) in enumerate(zip(mesh.degrees, owners, strict=True)):
            axes = [a for a, size in bounds[order].factors.get("t", ()) if owned(a) and size % degree == 0]
            picked = chooser.choice([None, *axes]) if order not in crossing else None
            rows = (*found[order], picked)
            is_legal = all(
                any(
                    not v.is_by_expert and _fits_rows(analysis, index, name, rows, at, v)
                    for v in variants(bounds[name], degree)
                )
                for name in members
            )
            found[order].append(picked if is_legal else None)
    return {name: tuple(found[order]) for name, order in order_of.items()}


def _fits_rows(analysis: Analysis, block: int, name: str, rows: _Rows | None, mesh_dim: int, variant: Variant) -> bool:
    """Whether a variant takes sorted rows as its region splits them."""
    if rows is None:
        return True
    bound, ragged = analysis.bounds[block][name], analysis.ragged[block]
    names = (*analysis.operands[block][name], name)
    for value, dims, kind in zip(
        names, (*bound.operands, bound.output), (*variant.operands, variant.output), strict=True
    ):
        if value in ragged:
            is_split = kind.kind == "S" and kind.dim in ragged[value]
            if (dims.axes[kind.dim][kind.position] if is_split else None) != rows[mesh_dim]:
                return False
    return True


def _ragged_between_blocks(program: Program, analysis: Analysis) -> list[str]:
    """Values with rows in such an order that leave a block; they are held whole."""
    return [
        result
        for call in program.calls
        for output, result in zip(program.blocks[call.block].outputs, call.results, strict=True)
        if output in analysis.ragged[call.block]
    ]


def check_random_labels(
    model: nn.Module,
    inputs: Inputs,
    *,
    tp: int,
    dp: int = 1,
    seeds: Iterable[int] = range(4),
    loss_fn: LossFunction | None = None,
) -> list[Equivalence]:
    """A model with drawn labels equals one device. `tp` and `dp` are mesh dimensions that may split any axis."""
    run = run_model(Request.of(model, inputs, loss_fn))
    # an axis belongs to one mesh dimension, so a dimension of one rank would leave axes whole
    mesh = Mesh.of(**{name: degree for name, degree in (("dp", dp), ("tp", tp)) if degree > 1})
    drawn = {seed: random_labels(run.program, run.analysis(mesh), mesh, seed) for seed in seeds}
    reports = {seed: compare_runs(run, run_labels(run, labels, mesh), mesh) for seed, labels in drawn.items()}
    for seed, report in reports.items():
        assert report.passed, f"random labels of seed {seed}: {report}"
    return list(reports.values())
