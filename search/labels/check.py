"""Verification of a labelling against the program alone, independent of the solver."""

from collections.abc import Mapping, Sequence

from autopar.capture.analysis import Analysis
from autopar.errors import PlanError, Problem
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block, Program
from autopar.ir.sharding import Dims, Mesh, Type, owned_by, splits_samples
from autopar.rules.variants import Variant, by_label, rewrites_fit, variants

_Types = tuple[Type, ...]


def check(program: Program, analysis: Analysis, labels: Sequence[BlockLabels], mesh: Mesh) -> None:
    """Raise `PlanError` with a list of everything illegal.

    Every operator must have a legal label, and no axis may be split twice. Every port and result must have a type that
    divides its value. A value that is bound to a port must have the port's type. The loss and its denominator must be
    invariant. Parameters and values between blocks must not be partial.
    """
    problems: list[Problem] = []
    if len(labels) != len(program.blocks):
        raise PlanError(f"labels of {len(labels)} blocks for a program of {len(program.blocks)}")
    for index, (block, of_block) in enumerate(zip(program.blocks, labels, strict=True)):
        problems += _block(analysis, block, index, of_block, mesh)
    problems += _boundaries(program, analysis, labels, mesh)
    if problems:
        raise PlanError("the labels are not legal; write the plan again with `autopar plan`", problems)


def _block(analysis: Analysis, block: Block, index: int, labels: BlockLabels, mesh: Mesh) -> list[Problem]:
    problems: list[Problem] = []
    where = f"block {block.name}"
    if labels.signature != block.signature:
        problems.append(Problem(path=where, rule="labels of another block"))
    known = {node.meta["key"] for node in block.graph.nodes if node.op == "call_function"}
    for given, allowed in (
        (labels.labels, known),
        (labels.ports, set(block.ports)),
        (labels.results, {*block.outputs}),
    ):
        unknown = sorted(given.keys() - allowed)
        problems += [Problem(path=f"{where}, {name}", rule="the block has no such value") for name in unknown]
    for node in block.operators:
        bound, key = analysis.bounds[index][node.name], node.meta["key"]
        chosen = labels.labels.get(key, ())
        if len(chosen) != len(mesh.degrees):
            problems.append(Problem(path=f"{where}, {key}", rule="needs one label per mesh dimension", value=chosen))
            continue
        axes: list[int] = []
        bound_variants: list[Variant] = []
        for degree, label in zip(mesh.degrees, chosen, strict=True):
            try:
                variant = by_label(variants(bound, degree), label)
            except KeyError as error:
                problems.append(Problem(path=f"{where}, {key}", rule=str(error.args[0])))
                continue
            bound_variants.append(variant)
            if variant.factor:
                axes.append(bound.factors[variant.factor][variant.axis][0])
        if len(set(axes)) < len(axes):
            problems.append(Problem(path=f"{where}, {key}", rule="one axis is split twice", value=chosen))
        if len(bound_variants) == len(chosen) and not rewrites_fit(bound, bound_variants, mesh.degrees):
            problems.append(Problem(path=f"{where}, {key}", rule="a rewrite needs a contiguous range", value=chosen))
    typed = {**labels.ports, **labels.results}
    names = [name for name, role in block.ports.items() if role != "scalar"] + list(block.outputs)
    for name in names:
        types, dims = typed.get(name, ()), analysis.dims[index][name]
        problems += _type(f"{where}, {name}", types, dims, mesh, analysis.batch_axes)
    return problems


def _type(where: str, types: _Types, dims: Dims, mesh: Mesh, batch: frozenset[int]) -> list[Problem]:
    """Check the types of one value: none is partial, each axis is split once, and the batch is split evenly."""
    if len(types) != len(mesh.degrees):
        return [Problem(path=where, rule="needs one type per mesh dimension", value=types)]
    problems, taken = [], set()
    for t, degree in zip(types, mesh.degrees, strict=True):
        if t.kind == "P":
            problems.append(Problem(path=where, rule="a value between blocks is partial", value=str(t)))
        if t.kind != "S":
            continue
        if not (0 <= t.dim < len(dims.sizes) and 0 <= t.position < len(dims.sizes[t.dim])):
            problems.append(Problem(path=where, rule=f"has no axis {t}", value=dims.sizes))
        elif (t.dim, t.position) in taken:
            problems.append(Problem(path=where, rule=f"axis {t} is split twice"))
        elif dims.axes[t.dim][t.position] in batch and dims.sizes[t.dim][t.position] % degree:
            rule = f"the batch of {dims.sizes[t.dim][t.position]} is not divisible by {degree}"
            problems.append(Problem(path=where, rule=rule))
        taken.add((t.dim, t.position))
    return problems


def _boundaries(program: Program, analysis: Analysis, labels: Sequence[BlockLabels], mesh: Mesh) -> list[Problem]:
    """Walk the calls in order: every value has one type, which is also the type of each port it is bound to."""
    problems: list[Problem] = []
    types: dict[str, _Types] = {}

    def bind(name: str, labels: Mapping[str, _Types], port: str, path: str) -> None:
        port_types = labels.get(port, ())
        known = types.setdefault(name, port_types)
        if known != port_types:
            problems.append(Problem(path=f"{path}, {port}", rule=f"{name} is {known} elsewhere", value=port_types))

    for call in program.calls:
        block, of_block = program.blocks[call.block], labels[call.block]
        for (port, role), argument in zip(block.ports.items(), call.arguments, strict=True):
            if isinstance(argument, str) and role != "scalar":
                bind(argument, of_block.ports, port, call.path)
        for output, result in zip(block.outputs, call.results, strict=True):
            bind(result, of_block.results, output, call.path)
    for name in sorted(program.invariant):
        if any(t.kind != "I" for t in types.get(name, ())):
            rule = "the loss, its denominator and new values of buffers are invariant"
            problems.append(Problem(path=name, rule=rule, value=types[name]))
    for name in program.parameters:
        for mesh_dim, t in zip(mesh.names, types.get(name, ()), strict=False):
            if t.kind == "S" and owned_by(mesh_dim) not in ("parameters", "experts"):
                rule = f"{mesh_dim} splits no parameters; ZeRO shards them over its ranks"
                problems.append(Problem(path=name, rule=rule, value=str(t)))
    for info in program.inputs:
        for mesh_dim, t in zip(mesh.names, types.get(info.name, ()), strict=False):
            if t.kind != "I" and not (splits_samples(mesh_dim) and t.dim == info.batch_dim):
                rule = "inputs are split along the batch only, by dp and ep"
                problems.append(Problem(path=info.name, rule=rule, value=str(t)))
    return problems
