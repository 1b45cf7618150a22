"""Degrees that do not divide an axis: the operators that every rank computes whole, and their price.

The labeller solves a mesh dimension once as if the degree divided every axis (the relaxed optimum). If that splits an
axis which the degree does not divide, it solves again with legal splits only (the true optimum). An operator that only
the relaxed optimum splits is computed whole on every rank. Any operator may be: the three colour channels of a
picture, the heads of an attention, a vocabulary. The plan notes it with its price (`_notes_on_axis`).

A degree is refused if the true optimum splits no product and no table. It is also refused if it does not divide a
data-parallel batch or a required sequence.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from autopar.capture.analysis import Analysis
from autopar.cost_model.work.operator_cost import target_name
from autopar.errors import PlanError, Problem
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh, chunk, splits_samples
from autopar.rules.variants import may_be_uneven
from autopar.search.labels.choices import ATTENTION, Boundary, Choice, NodeKey, is_paddable, num_experts

_LARGE = 0.2  # a price from which the note names better degrees, relative to the work of an even split
_MAX_NAMED = 3  # operators that a note lists


def batch_problems(program: Program, mesh: Mesh) -> list[Problem]:
    """Inputs whose batch the data-parallel degree does not divide."""
    degree = prod(n for name, n in zip(mesh.names, mesh.degrees, strict=True) if splits_samples(name))
    sizes = {i.shape[i.batch_dim] for i in program.inputs if i.batch_dim is not None}
    return _indivisible("batch", sizes, "{} sequences are", "dp", degree)


def _indivisible(path: str, sizes: Iterable[int], has: str, name: str, degree: int) -> list[Problem]:
    """The sizes that a degree does not divide, with the nearest degrees that do."""
    return [
        Problem(
            path=path,
            rule=f"{has.format(size)} not divisible by {name}={degree}",
            suggestion=nearest_degrees(size, degree),
        )
        for size in sorted(sizes)
        if size % degree
    ]


def context_problems(program: Program, analysis: Analysis, mesh: Mesh, context: str | None) -> list[Problem]:
    """Inputs whose sequence the context-parallel degree does not divide, or a `context` that nothing follows."""
    dims = [mesh.names[i] for i in mesh.owning("sequence") if mesh.degrees[i] > 1]
    if not dims:
        return []
    degree = prod(map(mesh.degree_of, dims))
    problems = sequence_problems(program, "cp" if len(dims) > 1 else dims[0], degree, option="cp")
    calls = (call for block in analysis.calls for call in block.values())
    if context is not None and not any(call.target is ATTENTION for call in calls):
        rule = "says how attention is split, and the model calls no scaled_dot_product_attention"
        problems.append(Problem(path="context", value=context, rule=rule, suggestion="leave it out"))
    return problems


def expert_problems(program: Program, analysis: Analysis, mesh: Mesh) -> list[Problem]:
    """Mixtures whose experts the expert-parallel degree does not divide."""
    degree = prod(mesh.degrees[i] for i in mesh.owning("experts"))
    counts = num_experts(program, analysis)
    if degree > 1 and not counts:
        if _copies_matrices(program, analysis):
            rule = "the model copies the matrices of an expert for each row, so no rank can hold a part of the experts"
            remedy = 'use experts_implementation="grouped_mm" of transformers, which has no float64: --dtype float32'
            return [Problem(path="ep", value=degree, rule=rule, suggestion=remedy)]
        return [Problem(path="ep", value=degree, rule="the model has no experts", suggestion="leave it out")]
    return _indivisible("ep", counts, "{} experts are", "ep", degree)


def _copies_matrices(program: Program, analysis: Analysis) -> bool:
    """Whether an operator takes matrices out of a parameter by positions, one for each row."""
    return any(
        block.ports.get(analysis.operands[index][name][0]) == "parameter"
        and len(call.operands[0].shape) == len(call.output.shape) == 3
        for index, block in enumerate(program.blocks)
        for name, call in analysis.calls[index].items()
        if analysis.operands[index][name] and str(call.target).startswith(("aten.index", "aten.embedding"))
    )


def sequence_problems(program: Program, name: str, degree: int, option: str = "sequence_parallel") -> list[Problem]:
    """Inputs whose sequence a required split cannot divide."""
    sizes = {i.shape[i.sequence_dim] for i in program.inputs if i.sequence_dim is not None}
    if not sizes:
        tokens = [i for i in program.inputs if len(i.shape) >= 2 and not i.dtype.is_floating_point]
        fixed = "the model does not run the same operators at another length, as with a loop over tokens"
        rule = fixed if tokens else "no input has a sequence"
        return [Problem(path=option, rule=rule, suggestion="leave the option out")]
    return _indivisible(option, sizes, "sequence length {} is", name, degree)


def nearest_degrees(size: int, degree: int, *, padded: bool = False) -> str:
    """The legal degrees next to `degree`, also with padding: ``nearest legal degrees 2 and 4``."""
    legal = [d for d in range(1, size + 1) if size % d == 0 or (padded and is_paddable(size, d))]
    below = [d for d in legal if d < degree][-1:]
    above = [d for d in legal if d > degree][:1]
    both = below + above
    return f"nearest legal degree{'s' if len(both) > 1 else ''} {' and '.join(str(d) for d in both)}"


def indivisible(analysis: Analysis, solved: Choice, paddable: frozenset[int]) -> dict[int, list[NodeKey]]:
    """The axes that a relaxed labelling splits although neither the degree nor padding can, and their operators."""
    nodes: dict[int, list[NodeKey]] = {}
    for (block, node), variant in solved.variants.items():
        if variant.factor:
            bound = analysis.bounds[block][node]
            axis, size = bound.factors[variant.factor][variant.axis]
            if size % solved.degree and not (axis in paddable and may_be_uneven(bound, variant.factor)):
                nodes.setdefault(axis, []).append((block, node))
    return nodes


def uneven_types(boundary: Boundary, solved: Choice, paddable: frozenset[int]) -> bool:
    """Whether a value between blocks is split along an axis that the degree does not divide, nor padding helps."""
    return any(axis not in paddable for axis, _ in _uneven_axes_of_types(boundary, solved))


def _uneven_axes_of_types(boundary: Boundary, solved: Choice) -> Iterator[tuple[int, int]]:
    """Axes, and their sizes, along which values between blocks and parameters are split unevenly."""
    for name, t in solved.types.items():
        dims = boundary.classes[name].dims
        if t.kind == "S" and dims.sizes[t.dim][t.position] % solved.degree:
            yield dims.axes[t.dim][t.position], dims.sizes[t.dim][t.position]


def padding_notes(program: Program, analysis: Analysis, boundary: Boundary, solved: Choice) -> list[str]:
    """The padded parameters: ``tp=4: transformer.wte.weight: 50257 rows are held as 4 × 12565``."""
    notes = []
    for axis, size in dict(_uneven_axes_of_types(boundary, solved)).items():
        holder, unit = _holder(program, boundary, axis), _unit(analysis, axis)
        notes.append(
            f"{solved.name}={solved.degree}: {holder}: {size} {unit} are held as "
            f"{solved.degree} × {chunk(size, solved.degree)}, the last ones padding"
        )
    return notes


def weight_of(program: Program, analysis: Analysis, key: NodeKey) -> float:
    """The work of an operator: the FLOP of a product, or 2 × elements × tokens of an embedding table."""
    block, node = key
    bound, call = analysis.bounds[block][node], analysis.calls[block][node]
    if bound.rule.flops is not None:
        return bound.rule.factor_flops()
    constants = {n for n, role in program.blocks[block].ports.items() if role in ("constant", "buffer")}
    if bound.rule.outermost and constants.isdisjoint(analysis.operands[block][node]):
        return 2.0 * prod(call.operands[0].shape) * (program.batch or 1) * (program.sequence or 1)
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The loss of a mesh dimension's labels by axes that its degree does not divide."""

    splits_nothing: bool  # the model has products or tables, and none is split
    problems: list[Problem]  # why nothing is split
    notes: list[str]  # the operators that are computed whole, and their price
    added_work: float  # of a rank, relative to its even share of the model's products
    split_share: float  # of the FLOP of the model's products


def judge(
    program: Program,
    analysis: Analysis,
    boundary: Boundary,
    relaxed: Choice,
    true: Choice,
    paddable: frozenset[int],
) -> Verdict:
    """Compare the best labels if every axis could be split with the best legal ones."""
    split_in_vain = indivisible(analysis, relaxed, paddable)
    share = 1.0 - _flops(program, analysis, (key for key, v in true.variants.items() if not v.factor))
    if not any(variant.factor and weight_of(program, analysis, key) for key, variant in true.variants.items()):
        has_work = any(weight_of(program, analysis, key) for key in true.variants)
        problems = [_problem(program, analysis, boundary, axis, keys, true) for axis, keys in split_in_vain.items()]
        problems = problems if has_work else []
        return Verdict(splits_nothing=has_work, problems=problems, notes=[], added_work=0.0, split_share=share)
    whole = [
        key
        for key, variant in relaxed.variants.items()
        if variant.factor and not true.variants[key].factor and weight_of(program, analysis, key)
    ]
    notes: list[str] = []
    for axis, keys in split_in_vain.items():
        notes += _notes_on_axis(program, analysis, axis, keys, whole, true)
    in_vain = {key for keys in split_in_vain.values() for key in keys}
    if beside := [key for key in whole if key not in in_vain]:  # to split them costs more communication than it saves
        cost = _in_words(_more_work(program, analysis, beside, true.degree))
        said = f"{_computed_whole(program, beside)}, as the operators beside them are{cost}"
        notes.append(f"{true.name}={true.degree}: {said}")
    added_work = _more_work(program, analysis, whole, true.degree)
    return Verdict(splits_nothing=False, problems=[], notes=notes, added_work=added_work, split_share=share)


def _notes_on_axis(
    program: Program, analysis: Analysis, axis: int, keys: list[NodeKey], whole: list[NodeKey], true: Choice
) -> Iterator[str]:
    """The operators that are computed whole, and the products that are split along another axis than the best one."""
    split, size = f"{true.name}={true.degree}", _size(analysis, keys[0], axis)
    reason = f"because {true.degree} does not divide {size} {_unit(analysis, axis)}"
    if mine := [key for key in keys if key in whole]:
        cost = _more_work(program, analysis, mine, true.degree)
        remedy = f"; {nearest_degrees(size, true.degree, padded=True)}" if cost >= _LARGE else ""
        yield f"{split}: {_computed_whole(program, mine)}, {reason}{_in_words(cost)}{remedy}"
    if axis in analysis.sequence_axes:
        yield f"{split}: no sequence parallelism, sequence length {program.sequence} is not divisible"
    moved = [key for key in keys if true.variants[key].factor and analysis.bounds[key[0]][key[1]].rule.flops]
    if moved:
        verb, remedy = "is" if len(moved) == 1 else "are", nearest_degrees(size, true.degree, padded=True)
        yield f"{split}: {_listed(program, moved)} {verb} split along another axis, {reason}; {remedy}"


def _computed_whole(program: Program, whole: list[NodeKey]) -> str:
    """``conv1:conv2d:0 is computed whole on every rank``."""
    return f"{_listed(program, whole)} {'is' if len(whole) == 1 else 'are'} computed whole on every rank"


def _listed(program: Program, keys: list[NodeKey]) -> str:
    """``fc1:linear:0, fc2:linear:0, fc3:linear:0 and 2 more``."""
    names = [_name(program, key) for key in keys]
    more = len(names) - _MAX_NAMED
    listed = [*names[:_MAX_NAMED], f"{more} more"] if more > 0 else names
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"


def _name(program: Program, key: NodeKey) -> str:
    block, node = key
    return next(str(n.meta["key"]) for n in program.blocks[block].graph.nodes if n.name == node)


def _more_work(program: Program, analysis: Analysis, whole: list[NodeKey], degree: int) -> float:
    """FLOP that a rank does more if these operators are whole, relative to its even share of the model's products."""
    return (degree - 1) * _flops(program, analysis, whole)


def _flops(program: Program, analysis: Analysis, keys: Iterable[NodeKey]) -> float:
    """The share of some operators in the FLOP of the model's products."""
    calls = [len(program.uses_of_block(block)) for block in range(len(program.blocks))]

    def flops(key: NodeKey) -> float:
        return calls[key[0]] * analysis.bounds[key[0]][key[1]].rule.factor_flops()

    total = sum(flops((block, node)) for block, bounds in enumerate(analysis.bounds) for node in bounds)
    return sum(map(flops, keys)) / total if total else 0.0


def _in_words(added_work: float) -> str:
    """``; a rank then does 1.55 × its even share of the work``, nothing for operators without products."""
    return f"; a rank then does {1 + added_work:.3g} × its even share of the work" if added_work > 0.0005 else ""


def _size(analysis: Analysis, key: NodeKey, axis: int) -> int:
    factors = analysis.bounds[key[0]][key[1]].factors
    return next(size for atoms in factors.values() for a, size in atoms if a == axis)


def _problem(
    program: Program, analysis: Analysis, boundary: Boundary, axis: int, keys: list[NodeKey], solved: Choice
) -> Problem:
    size, degree = _size(analysis, keys[0], axis), solved.degree
    holder = _holder(program, boundary, axis)
    where = f"{holder} has" if holder else "the model has"
    return Problem(
        path=kind_of_axis(analysis, axis),
        rule=f"{where} {size} {_unit(analysis, axis)}, not divisible by {solved.name}={degree}",
        suggestion=nearest_degrees(size, degree, padded=True),
    )


def _unit(analysis: Analysis, axis: int) -> str:
    units = {"heads": "heads", "vocabulary": "rows", "sequence": "positions"}
    return units.get(kind_of_axis(analysis, axis), "columns or rows")


def _holder(program: Program, boundary: Boundary, axis: int) -> str:
    """The parameter that has the axis in the simplest product; the largest of those, a matrix before a vector."""
    holders = []
    for c in boundary.classes.values():
        simplest = min((len(dim) for dim in c.dims.axes if axis in dim), default=None)
        if c.role == "parameter" and simplest is not None:
            elements = program.parameters[c.members[0]].num_elements
            holders.append((-len(c.dims.axes), simplest, -elements, c.members[0]))
    return min(holders)[-1] if holders else ""


def kind_of_axis(analysis: Analysis, axis: int) -> str:
    """A word for an axis, from the operators that have it: batch, sequence, heads, vocabulary, or width."""
    if axis in analysis.batch_axes:
        return "batch"
    if axis in analysis.sequence_axes:
        return "sequence"
    for bounds, calls in zip(analysis.bounds, analysis.calls, strict=True):
        for node, bound in bounds.items():
            factors = {f for f, atoms in bound.factors.items() if any(a == axis for a, _ in atoms)}
            if factors & bound.rule.outermost:
                return "vocabulary"
            attention = target_name(calls[node].target) == "scaled_dot_product_attention"
            if attention and factors - bound.rule.whole - {"f"}:
                return "heads"
    return "width"


def refuse(problems: list[Problem], mesh: Mesh) -> None:
    """Raise `PlanError` with all problems, if any."""
    if problems:
        degrees = ", ".join(f"{n}={d}" for n, d in mesh.as_dict().items() if d > 1)
        raise PlanError(f"{degrees} does not fit this model", problems)
