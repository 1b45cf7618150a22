"""The labeller: how to split a program over a mesh whose degrees are given.

`label` solves one network of choices per mesh dimension of size > 1. The network covers the *folded* program: each
distinct block occurs once, with its costs times its number of calls. Therefore the number of layers does not change the
size of the problem. Mesh dimensions are solved in turn, `dp` first, `cp` last. They never compete for an axis
(`autopar.search.labels.choices`). Solving them in turn is therefore exact, with one exception: an earlier dimension
does not know how much a later one will shrink a value.

`check` verifies a labelling independently of the solver.
"""

from collections.abc import Callable, Mapping
from math import prod

from autopar.capture.analysis import Analysis
from autopar.errors import InfeasibleError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.ir.sharding import I, Mesh, Type, owned_by
from autopar.memo import Memo
from autopar.search.labels import divisibility as legal
from autopar.search.labels.choices import Boundary, Choice, NodeKey, boundary_of, owned_axes, paddable_axes
from autopar.search.labels.costs import DimProblem
from autopar.search.labels.network import Solution
from autopar.search.labels.prices import Prices, prices_of
from autopar.search.labels.result import Labelling
from autopar.search.labels.turn import Turn

SPLIT_ENOUGH = 0.95  # of the products' FLOP: with less, splits of the residual stream are tried too
TIE = 1e-3
_Settled = tuple[Choice, Solution, legal.Verdict]


def label(
    program: Program,
    analysis: Analysis,
    degrees: Degrees,
    cluster: ClusterSpec,
    *,
    mesh: Mesh | None = None,
    regather: bool = True,
    hidden_axes: bool = False,
    pinned: Mapping[str, tuple[Type, ...]] | None = None,
    memo: Memo | None = None,
) -> Labelling:
    """The best labels on the mesh of `degrees`, or on `mesh`, for which `analysis` was refined.

    With `regather` the backward pass gathers values again instead of keeping them. The residual stream's hidden axes
    may be split with `hidden_axes`, and if much work stays whole without them. `pinned` gives the types of parameters
    that are held already, one per mesh dimension. `memo` holds the results of earlier labellings. An operator that a
    degree does not divide is computed whole, and noted.

    Raises `PlanError`, naming every axis, if nothing would be split, or if a batch or a required sequence cannot be
    split. Raises `InfeasibleError` if the solver finds no labels.
    """
    mesh, pinned, memo = mesh or degrees.mesh, pinned or {}, Memo() if memo is None else memo
    boundary = boundary_of(program, analysis)
    problems = legal.batch_problems(program, mesh) + legal.context_problems(program, analysis, mesh, degrees.context)
    problems += legal.expert_problems(program, analysis, mesh)
    if degrees.sequence_parallel:
        tensor = {mesh.names[i]: mesh.degrees[i] for i in mesh.owning("parameters") if mesh.degrees[i] > 1}
        problems += legal.sequence_problems(program, " × ".join(tensor), prod(tensor.values())) if tensor else []
    solved: list[Choice] = []
    notes: list[str] = []
    objective: dict[str, float] = {}
    gaps: list[float | None] = [0.0]
    added_work = 0.0
    for index in _order(mesh):
        is_tensor = owned_by(mesh.names[index]) == "parameters"
        if problems and not is_tensor:
            continue  # reported below, with the other indivisible axes
        prices = prices_of(program, analysis, boundary, cluster, mesh, index)

        def turn(hidden: bool, index: int = index, prices: Prices = prices) -> Turn:
            return Turn(
                program=program, analysis=analysis, boundary=boundary,
                name=mesh.names[index], degree=mesh.degrees[index], index=index, solved=tuple(solved),
                axes=owned_axes(program, analysis, boundary, mesh, index, solved, degrees.sequence_parallel, hidden),
                prices=prices, requires_sequence=degrees.sequence_parallel is True,
                accumulate=degrees.num_micro_batches, regather=regather, pinned=pinned,
                dispatch=degrees.dispatch, context=degrees.context,
            )  # fmt: skip

        choice, solution, verdict = _settled(turn, hidden_axes, memo, is_tensor)
        problems, added_work = problems + verdict.problems, added_work + verdict.added_work
        notes += [*verdict.notes, *legal.padding_notes(program, analysis, boundary, choice)]
        solved.append(choice)
        name = mesh.names[index]
        objective[name] = solution.objective
        gaps.append(solution.gap)
        notes += _notes(name, prices)
    legal.refuse(problems, mesh)
    return Labelling(
        mesh=mesh,
        blocks=_blocks(program, boundary, mesh, solved),
        objective=objective,
        gap=None if None in gaps else max(gap for gap in gaps if gap is not None),
        added_work=added_work,
        notes=tuple(notes),
    )


def _settled(turn: Callable[[bool], Turn], hidden_axes: bool, memo: Memo, is_tensor: bool) -> _Settled:
    """The labels of a turn. Hidden axes are tried where much work stays whole without them, as in plain layers."""
    try:
        plain = _settle(turn(hidden_axes), memo)
    except InfeasibleError:  # parameters may be held in parts of a hidden axis
        if hidden_axes or not is_tensor:
            raise
        return _settle(turn(True), memo)
    _, solution, verdict = plain
    if hidden_axes or not is_tensor or not (verdict.splits_nothing or verdict.split_share < SPLIT_ENOUGH):
        return plain
    try:
        other = _settle(turn(True), memo)
    except InfeasibleError:
        return plain
    return other if verdict.splits_nothing or other[1].objective < (1 - TIE) * solution.objective else plain


def _order(mesh: Mesh) -> list[int]:
    """Mesh dimensions of size > 1: `dp` first, then `ep`, `tp`, whose choices of heads bind parameters, and `cp`."""
    every = [i for owned in ("batch", "experts", "parameters", "sequence") for i in mesh.owning(owned)]
    return [i for i in every if mesh.degrees[i] > 1]


def _settle(turn: Turn, memo: Memo) -> _Settled:
    """The best legal labels, and their loss by axes that the degree does not divide."""
    program, analysis, boundary = turn.program, turn.analysis, turn.boundary
    choice, solution = memo(_solve, turn, True)
    relaxed = choice
    paddable = paddable_axes(program, analysis, turn.degree)
    if legal.indivisible(analysis, relaxed, paddable) or legal.uneven_types(boundary, relaxed, paddable):
        choice, solution = memo(_solve, turn, False)
    return choice, solution, legal.judge(program, analysis, boundary, relaxed, choice, paddable)


def _solve(turn: Turn, relaxed: bool) -> tuple[Choice, Solution]:
    """The best labels. Raises `InfeasibleError` if none are found."""
    result = DimProblem(turn, relaxed).solve()
    if result is None:
        raise InfeasibleError(f"no legal labels for {turn.name}={turn.degree}; use another degree")
    return result


def _notes(name: str, prices: Prices) -> list[str]:
    scaled = [f"arithmetic × {prices.compute_scale:.3g}"] if prices.compute_scale > 1 else []
    scaled += [f"latency × {prices.latency_scale:.3g}"] if prices.latency_scale < 1 else []
    said = f"{name}: labels chosen at the reference workload of docs/labelling.md ({', '.join(scaled)})"
    return [said] if scaled else []


def _blocks(program: Program, boundary: Boundary, mesh: Mesh, solved: list[Choice]) -> tuple[BlockLabels, ...]:
    """Labels by node key, types by port and result; mesh dimensions of size 1 are invariant."""
    by_index = {s.index: s for s in solved}
    turns = [by_index.get(k) for k in range(len(mesh.degrees))]

    def types(name: str) -> tuple[Type, ...]:
        return tuple(turn.types[name] if turn else I for turn in turns)

    def labels(key: NodeKey) -> tuple[str, ...]:
        return tuple(turn.variants[key].label if turn else "I" for turn in turns)

    return tuple(
        BlockLabels(
            name=block.name,
            signature=block.signature,
            ports={p: types(boundary.ports[i, p]) for p, role in block.ports.items() if role != "scalar"},
            labels={n.meta["key"]: labels((i, n.name)) for n in block.graph.nodes if n.op == "call_function"},
            results={name: types(boundary.results[i, name]) for name in block.outputs},
        )
        for i, block in enumerate(program.blocks)
    )
