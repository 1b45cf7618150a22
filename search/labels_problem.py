"""The integer program of one mesh dimension.

    minimise   Σ x[n,v]·work(n,v) + Σ z[u,σ,τ]·wire(u,σ,τ) + Σ y[c,τ]·state(c,τ) + Σ w[u,k]·saved(u,k)

    Σ_v x[n,v] = 1                        every operator n has one variant v                      (`_operators`)
    Σ_τ y[c,τ] = 1                        every boundary class c has one type τ                   (`_classes`)
    use(u,i,τ) ≤ source(u,τ) + Σ_σ z[u,σ,τ]    use i of value u in type τ is met or converted     (`_value`)
    z[u,σ,τ] ≤ source(u,σ)                a conversion starts at the type the value has           (`_value`)
    use(u,i,k) ≤ w[u,k] + Σ_σ z[u,σ,R]    what is kept for backward, once per form k; a gathered
                                          value is gathered again instead of kept                 (`_kept`)

`source(u,τ)` is the sum of the variants of u's operator that yield τ, or u's boundary class being τ. Costs of a
distinct block count as often as it is called. x and y are binary; with them integral, z and w are so by themselves.
A value without a cotangent knows no difference between I and R.

Ties are broken by tiny terms: fewer collectives first, then the order of variants and nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost_model.compute import PASSES, is_view, local_flops, parameter_state_bytes, saved_operands
from autopar.cost_model.conversions import Wire, wire
from autopar.ir.program import Program
from autopar.ir.sharding import DATA, I, Type, chunk
from autopar.rules.rule import TensorInfo
from autopar.rules.variants import Bound, Variant
from autopar.search.labels_milp import Milp, Solution
from autopar.search.labels_prices import Prices
from autopar.search.labels_space import (
    Boundary,
    BoundaryClass,
    NodeKey,
    Solved,
    Space,
    parameter_values,
    share_of,
)
from autopar.trace.analysis import Analysis

PER_COLLECTIVE = 1e-3  # in units of the largest all-reduce
SENT_TOGETHER = 0.5  # of it less where a neighbouring mesh dimension converts likewise
PER_MOVE = 1e-4
PER_RANK = 1e-5
GATHERED_BATCH = 1.0  # gathering along the batch undoes data parallelism; only what has no other way does it
Columns = Mapping[Type, Sequence[int]]


@dataclass(slots=True)
class _Use:
    """One use of a value: the columns that want each type, and whether the backward pass needs the value."""

    wanted: dict[Type, list[int]]
    kept: bool


class DimProblem:
    """Builds and solves the program of one mesh dimension."""

    def __init__(
        self,
        program: Program,
        analysis: Analysis,
        boundary: Boundary,
        space: Space,
        solved: list[Solved],
        prices: Prices,
        *,
        regather: bool,
        accumulate: int,
    ) -> None:
        self.program, self.analysis, self.boundary, self.space = program, analysis, boundary, space
        self.solved, self.prices, self.regather, self.accumulate = solved, prices, regather, accumulate
        self.milp = Milp()
        self.x: dict[NodeKey, dict[str, int]] = {}
        self.y: dict[str, dict[Type, int]] = {}
        self._classes()
        for index in range(len(program.blocks)):
            self._operators(index)
            self._values(index)

    def solve(self, time_limit_s: float) -> tuple[Solved, Solution] | None:
        """The best labels of this mesh dimension, None where none was found in time."""
        solution = self.milp.solve(time_limit_s)
        if solution is None:
            return None
        chosen = {
            key: next(v for v in self.space.variants[key] if solution.chosen(columns[v.label]))
            for key, columns in self.x.items()
        }
        types = {name: next(t for t, c in columns.items() if solution.chosen(c)) for name, columns in self.y.items()}
        for (block, node), name in self.boundary.results.items():
            if self.boundary.classes[name].free:  # dropped in training: leaves as it is, but never partial
                made = chosen[block, node].output
                types[name] = I if made.kind == "P" else made
        space = self.space
        found = Solved(index=space.index, name=space.name, degree=space.degree, variants=chosen, types=types)
        return found, solution

    # ---- variables ----

    def _classes(self) -> None:
        for name, candidates in self.space.types.items():
            if not candidates:
                continue
            c = self.boundary.classes[name]
            costs = [self._state(c, t) / self.prices.unit_s + PER_RANK * k for k, t in enumerate(candidates)]
            self.y[name] = {t: self.milp.binary(cost) for t, cost in zip(candidates, costs, strict=True)}
            self.milp.equal(((column, 1.0) for column in self.y[name].values()), 1.0)

    def _state(self, c: BoundaryClass, t: Type) -> float:
        """Memory of a parameter's state, and of its gradient's sum once per step where it is replicated."""
        if c.role != "parameter":
            return 0.0
        infos = [self.program.parameters[m] for m in c.members]
        share = 1 / prod(s.degree for s in self.solved if s.types[c.name].kind == "S")
        elements = share * sum(info.num_elements for info in infos)
        held = elements * parameter_state_bytes([info.dtype for info in infos])
        cost = self.prices.state_byte_s * held * self._part(t)
        if t.kind == "R" and c.differentiable:
            summed = self.prices.ring.seconds("all_reduce", elements * c.itemsize, latency=False)
            cost += summed / self.accumulate
        return cost

    def _part(self, t: Type) -> float:
        return 1 / self.space.degree if t.kind == "S" else 1.0

    def _operators(self, index: int) -> None:
        calls = len(self.program.uses_of_block(index))
        bounds = self.analysis.bounds[index]
        for place, (node, bound) in enumerate(bounds.items()):
            columns = {}
            for rank, variant in enumerate(self.space.variants[index, node]):
                seconds, collectives = self._work((index, node), bound, variant)
                cost = calls * (seconds / self.prices.unit_s + PER_COLLECTIVE * collectives)
                columns[variant.label] = self.milp.binary(cost + PER_RANK * rank * (1 + place / len(bounds)))
            self.x[index, node] = columns
            self.milp.equal(((column, 1.0) for column in columns.values()), 1.0)

    def _work(self, key: NodeKey, bound: Bound, variant: Variant) -> tuple[float, int]:
        """Seconds of an operator on one rank, forward and backward, and the collectives inside it."""
        call = self.analysis.calls[key[0]][key[1]]
        chosen = [(s.variants[key], s.degree) for s in self.solved] + [(variant, self.space.degree)]
        degrees: dict[str, float] = {}
        for v, degree in chosen:
            if v.factor:
                size = bound.factors[v.factor][v.axis][1]
                degrees[v.factor] = degrees.get(v.factor, 1.0) * size / chunk(size, degree)
        passes = PASSES if call.output.differentiable else 1.0
        seconds = passes * local_flops(bound.rule, degrees) * self.prices.flop_s[str(call.output.dtype)]
        if not is_view(call):
            touched = 0.0
            for k, info in enumerate((*call.operands, call.output)):
                types = [(v.operands[k] if k < len(call.operands) else v.output, degree) for v, degree in chosen]
                touched += prod(info.shape) * info.dtype.itemsize / prod(d for t, d in types if t.kind == "S")
            seconds += passes * touched * self.prices.byte_s
        if variant.factor not in bound.rule.invariant:
            return seconds, 0
        rest = prod(s for f, s in bound.rule.sizes.items() if f != variant.factor) * 4.0
        rest /= prod(d for f, d in degrees.items() if f != variant.factor)
        return seconds + self._wire_s(("all_reduce", "all_reduce"), rest, 1.5 * rest), 2

    # ---- values ----

    def _values(self, index: int) -> None:
        block = self.program.blocks[index]
        uses: dict[str, list[_Use]] = {}
        for node in self.analysis.bounds[index]:
            call, bound = self.analysis.calls[index][node], self.analysis.bounds[index][node]
            kept = saved_operands(call, bound.rule)
            for k, name in enumerate(self.analysis.operands[index][node]):
                wanted: dict[Type, list[int]] = {}
                for variant in self.space.variants[index, node]:
                    flows = call.operands[k].differentiable
                    wanted.setdefault(_plain(variant.operands[k], flows), []).append(self.x[index, node][variant.label])
                uses.setdefault(name, []).append(_Use(wanted, k in kept))
        infos = {n.name: n.meta["info"] for n in block.graph.nodes if "info" in n.meta}
        for name in block.outputs:
            columns = self.y.get(self.boundary.results[index, name], {})
            wanted = {}
            for t, column in columns.items():
                wanted.setdefault(_plain(t, infos[name].differentiable), []).append(column)
            if wanted:
                uses.setdefault(name, []).append(_Use(wanted, False))
        roles = {port.name: str(port.role) for port in block.ports}
        roles |= dict.fromkeys(parameter_values(self.program, self.analysis, index), "parameter")
        for name, found in uses.items():
            role = roles.get(name, "value")
            self._value(index, name, role, infos[name], found)

    def _source(self, index: int, name: str, flows: bool) -> dict[Type, list[int]]:
        source: dict[Type, list[int]] = {}
        if (index, name) in self.x:
            for variant in self.space.variants[index, name]:
                column = self.x[index, name][variant.label]
                source.setdefault(_plain(variant.output, flows), []).append(column)
        else:
            for t, column in self.y[self.boundary.ports[index, name]].items():
                source.setdefault(_plain(t, flows), []).append(column)
        return source

    def _value(self, index: int, name: str, role: str, info: TensorInfo, uses: Sequence[_Use]) -> None:
        """Conversions of one value, shared by all uses that want the same type."""
        milp, calls = self.milp, len(self.program.uses_of_block(index))
        whole = prod(info.shape) * info.dtype.itemsize * share_of(self.solved, self.boundary, (index, name))
        source = self._source(index, name, info.differentiable)
        kept = [use for use in uses if use.kept] if role not in ("parameter", "constant", "buffer") else []
        alike = self._conversions_of_neighbour(index, name)
        converted: dict[Type, dict[Type, int]] = {}
        for target in {t: None for use in uses for t in use.wanted}:
            converted[target] = {}
            for start, columns in source.items():
                if start == target or (role == "parameter" and start.kind == "S"):
                    continue  # a tensor dimension moves activations; gathering parameters is ZeRO's way
                together = (start.kind, target.kind) in alike
                size = whole / alike[start.kind, target.kind] if together else whole
                cost = self._convert(start, target, info.differentiable, role, size)
                cost -= SENT_TOGETHER * PER_COLLECTIVE * together
                if kept and self.regather and (start.kind, target.kind) == ("S", "R"):
                    cost += self.prices.saved_byte_s / self.prices.unit_s * whole / self.space.degree
                column = milp.continuous(calls * cost)
                converted[target][start] = column
                if len(source) > 1:
                    milp.at_most([(column, 1.0), *((c, -1.0) for c in columns)], 0.0)
            for use in uses:
                if target in use.wanted:
                    ready = [(c, -1.0) for c in source.get(target, ())]
                    moved = [(c, -1.0) for c in converted[target].values()]
                    milp.at_most([*((c, 1.0) for c in use.wanted[target]), *ready, *moved], 0.0)
        self._kept(kept, converted, whole, calls)

    def _conversions_of_neighbour(self, index: int, name: str) -> dict[tuple[str, str], int]:
        """Conversions of a value on the tensor mesh dimension before this one, and by how much they shrink it.

        Equal ones send as one: what the second adds to the first is what it would send of the part that the first
        leaves.
        """
        before = next((s for s in self.solved if s.index == self.space.index - 1 and s.name != DATA), None)
        if before is None:
            return {}
        source = before.type_of(self.boundary, (index, name))
        wanted = [
            before.variants[index, node].operands[k]
            for node, names in self.analysis.operands[index].items()
            for k, operand in enumerate(names)
            if operand == name
        ]
        if (index, name) in self.boundary.results:
            wanted.append(before.types[self.boundary.results[index, name]])
        # a shard is priced as a part already
        return {(source.kind, t.kind): 1 if source.kind == "S" else before.degree for t in wanted if t != source}

    def _kept(
        self, uses: Sequence[_Use], converted: Mapping[Type, Mapping[Type, int]], whole: float, calls: int
    ) -> None:
        forms: dict[Type, int] = {}
        for use in uses:
            for target, columns in use.wanted.items():
                form = I if target.kind == "R" else target
                if form not in forms:
                    cost = self.prices.saved_byte_s * whole * self._part(form) / self.prices.unit_s
                    forms[form] = self.milp.continuous(calls * cost)
                gathered = [c for s, c in converted[target].items() if s.kind == "S" and target.kind == "R"]
                again = [(c, -1.0) for c in gathered] if self.regather else []
                self.milp.at_most([*((c, 1.0) for c in columns), (forms[form], -1.0), *again], 0.0)

    def _convert(self, source: Type, target: Type, differentiable: bool, role: str, whole: float) -> float:
        """Cost of one conversion in units; the sum of a parameter's gradient has no latency of its own."""
        sends = wire(source, target, differentiable)
        if role in ("constant", "buffer") and sends == (None, None):
            return PER_RANK
        seconds = self._wire_s(sends, whole, whole, gradient_latency=role != "parameter")
        if sends != (None, None):
            if self.space.name == DATA and source.kind == "S" and target.kind != "S":
                seconds += GATHERED_BATCH * self.prices.unit_s
            return seconds / self.prices.unit_s + PER_COLLECTIVE * sum(kind is not None for kind in sends)
        if {source.kind, target.kind} != {"I", "R"}:
            seconds += 2 * whole * self.prices.byte_s  # zeros are written, or a slice is copied
        return seconds / self.prices.unit_s + PER_MOVE

    def _wire_s(self, sends: Wire, forward: float, backward: float, *, gradient_latency: bool = True) -> float:
        ring, total = self.prices.ring, 0.0
        for kind, size, latency in ((sends[0], forward, True), (sends[1], backward, gradient_latency)):
            if kind is not None:
                total += ring.seconds(kind, size, latency=False)
                total += ring.latency_of(kind) * self.prices.latency_scale * latency
        return total


def _plain(t: Type, differentiable: bool) -> Type:
    """Without a cotangent R is I."""
    return I if t.kind == "R" and not differentiable else t
