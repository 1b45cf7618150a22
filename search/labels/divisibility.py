"""Degrees that do not divide: found by labelling once as if everything divided, reported all at once.

If the relaxed optimum splits only axes that the degree divides, it is the optimum. Where it splits others, the true
optimum decides. An axis is a violation if, for want of it,

* a product of activations (attention) can no longer be split along the same factor,
* or a vocabulary can not, where it is a good part of its block,
* or products that are a good part of a repeated block's work, or of the model's, can not.

What is less than that stays whole, right but slower, and is noted: the key projection of a model with fewer key heads
than ranks, the three colour channels of a picture, a table of positions.
"""

from collections.abc import Iterator
from math import prod

from autopar.capture.analysis import Analysis
from autopar.cost_model.work.operator_cost import operator_name
from autopar.errors import PlanError, Problem
from autopar.ir.program import Program
from autopar.ir.sharding import DATA, Mesh, chunk
from autopar.rules.variants import may_be_uneven
from autopar.search.labels.choices import Boundary, NodeKey, Solved, is_paddable, parameter_values

SMALL = 0.2  # of the work in products and tables


def batch_problems(program: Program, mesh: Mesh) -> list[Problem]:
    """Inputs whose batch the data-parallel degree does not divide."""
    found = []
    for name, degree in mesh.as_dict().items():
        sizes = {i.shape[i.batch_dim] for i in program.inputs if i.batch_dim is not None}
        for size in sorted(sizes) if name == DATA else ():
            if size % degree:
                found.append(
                    Problem(
                        path="batch",
                        rule=f"{size} sequences are not divisible by {name}={degree}",
                        suggestion=nearest_degrees(size, degree),
                    )
                )
    return found


def sequence_problems(program: Program, name: str, degree: int) -> list[Problem]:
    """Inputs whose sequence a required sequence parallelism cannot divide."""
    sizes = {i.shape[i.sequence_dim] for i in program.inputs if i.sequence_dim is not None}
    if not sizes:
        return [Problem(path="sequence_parallel", rule="no input has a sequence", suggestion="leave the option away")]
    return [
        Problem(
            path="sequence_parallel",
            rule=f"sequence length {size} is not divisible by {name}={degree}",
            suggestion=nearest_degrees(size, degree),
        )
        for size in sorted(sizes)
        if size % degree
    ]


def nearest_degrees(size: int, degree: int, *, padded: bool = False) -> str:
    """The legal degrees next to `degree`, with those that padding allows: ``nearest legal degrees 2 and 4``."""
    legal = [d for d in range(1, size + 1) if size % d == 0 or (padded and is_paddable(size, d))]
    below = [d for d in legal if d < degree][-1:]
    above = [d for d in legal if d > degree][:1]
    both = below + above
    return f"nearest legal degree{'s' if len(both) > 1 else ''} {' and '.join(str(d) for d in both)}"


def indivisible(analysis: Analysis, solved: Solved, paddable: frozenset[int]) -> dict[int, list[NodeKey]]:
    """Axes that a relaxed labelling splits although the degree does not divide them, and the operators that do.

    Paddable axes are none, but where an operator adds padding to data.
    """
    found: dict[int, list[NodeKey]] = {}
    for (block, node), variant in solved.variants.items():
        if variant.factor:
            bound = analysis.bounds[block][node]
            axis, size = bound.factors[variant.factor][variant.axis]
            if size % solved.degree and not (axis in paddable and may_be_uneven(bound, variant.factor)):
                found.setdefault(axis, []).append((block, node))
    return found


def uneven_types(boundary: Boundary, solved: Solved, paddable: frozenset[int]) -> bool:
    """Whether a value between blocks is split along an axis that the degree does not divide, nor padding helps."""
    return any(axis not in paddable for axis, _ in _uneven_axes_of_types(boundary, solved))


def _uneven_axes_of_types(boundary: Boundary, solved: Solved) -> Iterator[tuple[int, int]]:
    """Axes, and their sizes, along which values between blocks and parameters are split unevenly."""
    for name, t in solved.types.items():
        dims = boundary.classes[name].dims
        if t.kind == "S" and dims.sizes[t.dim][t.position] % solved.degree:
            yield dims.axes[t.dim][t.position], dims.sizes[t.dim][t.position]


def padding_notes(program: Program, analysis: Analysis, boundary: Boundary, solved: Solved) -> list[str]:
    """What is padded: ``tp=4: transformer.wte.weight: 50257 rows are held as 4 × 12565``."""
    notes = []
    for axis, size in dict(_uneven_axes_of_types(boundary, solved)).items():
        holder, unit = _holder(program, boundary, axis), _unit(analysis, axis)
        notes.append(
            f"{solved.name}={solved.degree}: {holder}: {size} {unit} are held as "
            f"{solved.degree} × {chunk(size, solved.degree)}, the last ones padding"
        )
    return notes


def weight_of(program: Program, analysis: Analysis, key: NodeKey) -> float:
    """How much work an operator is: FLOP of a product, or what the elements of a table of tokens would attract."""
    block, node = key
    bound, call = analysis.bounds[block][node], analysis.calls[block][node]
    if bound.rule.flops is not None:
        return bound.rule.factor_flops()
    constants = {p.name for p in program.blocks[block].ports if p.role in ("constant", "buffer")}
    if bound.rule.outermost and constants.isdisjoint(analysis.operands[block][node]):
        return 2.0 * prod(call.operands[0].shape) * (program.batch or 1) * (program.sequence or 1)
    return 0.0


def violations(
    program: Program,
    analysis: Analysis,
    boundary: Boundary,
    relaxed: Solved,
    true: Solved,
    paddable: frozenset[int],
) -> tuple[list[Problem], list[str]]:
    """Problems of axes that should be split and cannot be, and notes on operators that stay whole."""
    of_block = [
        sum(weight_of(program, analysis, (i, node)) for node in bounds) for i, bounds in enumerate(analysis.bounds)
    ]
    calls = [len(program.uses_of_block(i)) for i in range(len(program.blocks))]
    total = sum(weight * count for weight, count in zip(of_block, calls, strict=True))
    problems, notes = [], []
    for axis, keys in indivisible(analysis, relaxed, paddable).items():
        lost = {
            key: weight_of(program, analysis, key)
            for key in keys
            if not true.variants[key].factor
            or (_is_attention(program, analysis, key) and relaxed.variants[key].factor != true.variants[key].factor)
        }
        vocabulary = kind_of_axis(analysis, axis) == "vocabulary"
        in_block = {block: sum(w for (b, _), w in lost.items() if b == block) for block, _ in lost}
        if (
            any(_is_attention(program, analysis, key) for key in lost)
            or any(w > SMALL * of_block[b] for b, w in in_block.items() if vocabulary or calls[b] > 1)
            or sum(w * calls[b] for b, w in in_block.items()) > SMALL * total
        ):
            problems.append(_problem(program, analysis, boundary, axis, keys, true))
        else:
            notes += _notes(program, analysis, axis, [key for key, weight in lost.items() if weight], true)
    return problems, notes


def _notes(program: Program, analysis: Analysis, axis: int, keys: list[NodeKey], true: Solved) -> list[str]:
    found = []
    for block, node in keys:
        name = next(n.meta["key"] for n in program.blocks[block].graph.nodes if n.name == node)
        size = _size(analysis, (block, node), axis)
        found.append(f"{true.name}={true.degree}: {name} is computed whole, its axis of {size} is not divisible")
    if axis in analysis.sequence_axes:
        found.append(
            f"{true.name}={true.degree}: no sequence parallelism, sequence length {program.sequence} is not divisible"
        )
    return found


def _is_attention(program: Program, analysis: Analysis, key: NodeKey) -> bool:
    """A product of activations: without its split, the split of what feeds it has to be undone."""
    block, node = key
    return analysis.bounds[block][node].rule.flops is not None and parameter_values(
        program, analysis, block
    ).isdisjoint(analysis.operands[block][node])


def _size(analysis: Analysis, key: NodeKey, axis: int) -> int:
    factors = analysis.bounds[key[0]][key[1]].factors
    return next(size for atoms in factors.values() for a, size in atoms if a == axis)


def _problem(
    program: Program, analysis: Analysis, boundary: Boundary, axis: int, keys: list[NodeKey], solved: Solved
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
    found = []
    for c in boundary.classes.values():
        simplest = min((len(dim) for dim in c.dims.axes if axis in dim), default=None)
        if c.role == "parameter" and simplest is not None:
            elements = program.parameters[c.members[0]].num_elements
            found.append((-len(c.dims.axes), simplest, -elements, c.members[0]))
    return min(found)[-1] if found else ""


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
            attention = operator_name(calls[node].target) == "scaled_dot_product_attention"
            if attention and factors - bound.rule.whole - {"f"}:
                return "heads"
    return "width"


def refuse(problems: list[Problem], mesh: Mesh) -> None:
    """Raise `PlanError` with all problems, if any."""
    if problems:
        degrees = ", ".join(f"{n}={d}" for n, d in mesh.as_dict().items() if d > 1)
        raise PlanError(f"{degrees} does not divide this model", problems)
