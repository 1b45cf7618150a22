"""The network of one mesh dimension: its variables, its values and their costs.

    minimise   Σ work(n, v) + Σ state(c, τ) + Σ wire(u, σ, τ) + Σ saved(u, k)

over a variant v for every operator n (`_operators`) and a type τ for every boundary class c (`_classes`). If the source
of value u yields type σ, then u is converted once to every other type τ that a use wants. The backward pass keeps u
once per form k. A gathered value is gathered again instead (`_value`). The costs of a distinct block are multiplied by
its number of calls. For a value without a cotangent, I and R are the same.

Tiny terms break ties: fewer collectives first, then the order of variants and nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf, prod

import numpy as np

from autopar.capture.analysis import parameter_values
from autopar.cost_model.work.operator_cost import (
    is_view,
    local_flops,
    parameter_state_bytes,
    passes_of,
    saved_operands,
)
from autopar.ir.sharding import I, Kind, Type, chunk, moves_along, owned_by
from autopar.lowering.conversions import Wire, wire
from autopar.memo import Memo
from autopar.rules.rule import Call, TensorInfo
from autopar.rules.variants import WIDTH_OF_SUMS, Bound, Exchange, Variant, exchanges
from autopar.search.labels.choices import BoundaryClass, Choice, NodeKey, share_of
from autopar.search.labels.elimination import eliminated
from autopar.search.labels.neighbourhoods import improved
from autopar.search.labels.network import FloatArray, IntArray, Network, NetworkValue, Solution, Use
from autopar.search.labels.turn import Turn, types_of, variants_of

PER_COLLECTIVE = 1e-3  # in units of the largest all-reduce
SENT_TOGETHER = 0.5  # of it less if a neighbouring mesh dimension has the same conversion
PER_MOVE = 1e-4
PER_RANK = 1e-5
GATHERED_BATCH = 1.0  # gathering along the batch undoes data parallelism, and is the last resort


# one use of a value: a variable, the type that each of its choices wants, and whether the backward pass needs it
_Use = tuple[int, list[Type], bool]


class DimProblem:
    """Builds and solves the network of one mesh dimension."""

    def __init__(self, turn: Turn, relaxed: bool) -> None:
        program = turn.program
        self.turn, self.program, self.analysis = turn, program, turn.analysis
        self.variants, self.types = variants_of(turn, relaxed), types_of(turn, relaxed)
        self.boundary, self.solved, self.prices = turn.boundary, turn.solved, turn.prices
        self.calls = [len(program.uses_of_block(i)) for i in range(len(program.blocks))]
        self.operators: dict[NodeKey, int] = {}  # the variables of operators and of boundary classes
        self.classes: dict[str, int] = {}
        self.costs: list[FloatArray] = []
        self.values: list[NetworkValue] = []
        self.converted = Memo()  # costs: values are of few sizes
        self.undoes = [self._undoes(i) for i in range(len(program.blocks))]
        self._classes()
        for index in range(len(program.blocks)):
            self._operators(index)
            self._values(index)
        self.network = Network(costs=tuple(self.costs), values=tuple(self.values))

    def solve(self) -> tuple[Choice, Solution] | None:
        """The best labels of this mesh dimension. None if there are none, or if the rounds find none."""
        solution = eliminated(self.network) or improved(self.network)
        if solution is None or solution.objective == inf:
            return None
        chosen = {key: self.variants[key][solution.choices[at]] for key, at in self.operators.items()}
        types = {name: self.types[name][solution.choices[at]] for name, at in self.classes.items()}
        for (block, node), name in self.boundary.results.items():
            if self.boundary.classes[name].free:  # training drops it: no conversion, but never partial
                made_type = chosen[block, node].output
                types[name] = I if made_type.kind == "P" else made_type
        turn = self.turn
        return Choice(index=turn.index, name=turn.name, degree=turn.degree, variants=chosen, types=types), solution

    def _undoes(self, index: int) -> bool:
        """Whether a gather along the batch undoes data parallelism. A block with experts may gather tokens for them."""
        if owned_by(self.turn.name) != "experts":
            return owned_by(self.turn.name) == "batch"
        experts, dims = self.turn.axes - self.analysis.batch_axes, self.analysis.dims[index]
        ports = [name for name, role in self.program.blocks[index].ports.items() if role == "parameter"]
        return experts.isdisjoint(axis for name in ports for axes in dims[name].axes for axis in axes)

    # ---- variables ----

    def _variable(self, costs: list[float]) -> int:
        self.costs.append(np.array(costs))
        return len(self.costs) - 1

    def _classes(self) -> None:
        for name, candidates in self.types.items():
            if not candidates:
                continue
            c = self.boundary.classes[name]
            states = self._states(c, candidates) if c.role == "parameter" else [0.0] * len(candidates)
            costs = [state / self.prices.unit_s + PER_RANK * k for k, state in enumerate(states)]
            self.classes[name] = self._variable(costs)

    def _states(self, c: BoundaryClass, candidates: Sequence[Type]) -> Iterator[float]:
        """The memory of a parameter's state, and of a replicated one the sum of its gradient, once a step."""
        infos = [self.program.parameters[m] for m in c.members]
        share = 1 / prod(s.degree for s in self.solved if s.types[c.name].kind == "S")
        elements = share * sum(info.num_elements for info in infos)
        held = elements * parameter_state_bytes(infos)
        summed = self.prices.ring.seconds("all_reduce", elements * c.itemsize) / self.turn.accumulate
        for t in candidates:
            is_summed = t.kind == "R" and c.differentiable
            yield self.prices.state_byte_s * held * self._part(t) + is_summed * summed

    def _part(self, t: Type) -> float:
        return 1 / self.turn.degree if t.kind == "S" else 1.0

    def _operators(self, index: int) -> None:
        calls = self.calls[index]
        bounds = self.analysis.bounds[index]
        for place, (node, bound) in enumerate(bounds.items()):
            costs, moves_data = [], not is_view(self.analysis.calls[index][node])
            for rank, variant in enumerate(self.variants[index, node]):
                seconds, collectives = self._work((index, node), bound, variant, moves_data)
                cost = calls * (seconds / self.prices.unit_s + PER_COLLECTIVE * collectives)
                costs.append(cost + PER_RANK * rank * (1 + place / len(bounds)))
            self.operators[index, node] = self._variable(costs)

    def _work(self, key: NodeKey, bound: Bound, variant: Variant, moves_data: bool) -> tuple[float, int]:
        """Seconds of an operator on one rank, forward and backward, and the collectives inside it."""
        call = self.analysis.calls[key[0]][key[1]]
        chosen = [(s.variants[key], s.degree) for s in self.solved] + [(variant, self.turn.degree)]
        degrees: dict[str, float] = {}
        for v, degree in chosen:
            if v.factor:
                size = bound.factors[v.factor][v.axis][1]
                degrees[v.factor] = degrees.get(v.factor, 1.0) * size / chunk(size, degree)
        passes = passes_of(call, bound.rule)
        seconds = passes * local_flops(bound.rule, degrees) * self.prices.flop_s[str(call.output.dtype)]
        if moves_data:
            touched = 0.0
            for k, info in enumerate((*call.operands, call.output)):
                types = [(v.operands[k] if k < len(call.operands) else v.output, degree) for v, degree in chosen]
                touched += prod(info.shape) * info.dtype.itemsize / prod(d for t, d in types if t.kind == "S")
            seconds += passes * touched * self.prices.byte_s
        if messages := exchanges(bound.rule, variant):
            hidden_by = passes * self.prices.hiding * local_flops(bound.rule, degrees) * self.prices.peak_s(call)
            return seconds + self._exchange_s(call, messages, variant, chosen, hidden_by), len(messages)
        if variant.factor not in bound.rule.invariant:
            return seconds, 0
        rest = prod(s for f, s in bound.rule.sizes.items() if f != variant.factor) * 4.0
        rest /= prod(d for f, d in degrees.items() if f != variant.factor)
        return seconds + self._wire_s(("all_reduce", "all_reduce"), rest, 1.5 * rest), 2

    def _exchange_s(
        self,
        call: Call,
        messages: Sequence[Exchange],
        variant: Variant,
        chosen: Sequence[tuple[Variant, int]],
        hidden_by: float,
    ) -> float:
        """Seconds of what a rewrite sends in both passes. Computing hides `hidden_by` of messages beside it."""
        ring, degree = self.prices.ring, self.turn.degree
        exposed = beside = 0.0
        for exchange in messages:
            whole, times = 0.0, exchange.per_rank * degree + exchange.more
            for k in exchange.operands:
                info = call.output if k < 0 else call.operands[k]
                types = [(v.output if k < 0 else v.operands[k], d) for v, d in chosen if v is not variant]
                item = max(info.dtype.itemsize, WIDTH_OF_SUMS if exchange.sums else 0)
                whole += prod(info.shape) * item / prod(d for t, d in types if t.kind == "S")
            seconds = ring.seconds(exchange.collective, whole / (2 if exchange.is_half else 1))
            seconds = times * (seconds + ring.latency_of(exchange.collective) * self.prices.latency_scale)
            exposed, beside = (exposed, beside + seconds) if exchange.is_beside else (exposed + seconds, beside)
        return exposed + max(0.0, beside - hidden_by * (degree - 1) / degree)

    # ---- values ----

    def _values(self, index: int) -> None:
        block = self.program.blocks[index]
        infos = {n.name: n.meta["info"] for n in block.graph.nodes if "info" in n.meta}
        uses: dict[str, list[_Use]] = {}
        for node, bound in self.analysis.bounds[index].items():
            call, variable = self.analysis.calls[index][node], self.operators[index, node]
            kept = saved_operands(call, bound.rule)
            for k, name in enumerate(self.analysis.operands[index][node]):
                flows = call.operands[k].differentiable
                wanted = [_plain(variant.operands[k], flows) for variant in self.variants[index, node]]
                uses.setdefault(name, []).append((variable, wanted, k in kept))
        for name in block.outputs:
            leaves_as = self.boundary.results[index, name]
            if leaves_as in self.classes:
                wanted = [_plain(t, infos[name].differentiable) for t in self.types[leaves_as]]
                uses.setdefault(name, []).append((self.classes[leaves_as], wanted, False))
        roles: dict[str, str] = dict(block.ports)
        roles |= dict.fromkeys(parameter_values(self.program, self.analysis, index), "parameter")
        for name, value_uses in uses.items():
            self.values.append(self._value(index, name, roles.get(name, "value"), infos[name], value_uses))

    def _source(self, index: int, name: str, flows: bool) -> tuple[int, list[Type]]:
        """The variable that makes a value, and the type of each of its choices."""
        if (index, name) in self.operators:
            variants = self.variants[index, name]
            return self.operators[index, name], [_plain(variant.output, flows) for variant in variants]
        bound_to = self.boundary.ports[index, name]
        return self.classes[bound_to], [_plain(t, flows) for t in self.types[bound_to]]

    def _value(self, index: int, name: str, role: str, info: TensorInfo, uses: Sequence[_Use]) -> NetworkValue:
        """Conversions of one value, shared by all uses that want the same type, and the forms kept for backward."""
        calls = self.calls[index]
        whole = prod(info.shape) * info.dtype.itemsize * share_of(self.solved, self.boundary, (index, name))
        source, start_types = self._source(index, name, info.differentiable)
        is_kept = any(kept for _, _, kept in uses) and role not in ("parameter", "constant", "buffer")
        types = tuple(dict.fromkeys((*start_types, *(t for _, wanted, _ in uses for t in wanted), I)))
        number = {t: k for k, t in enumerate(types)}
        gather = ("S", "R") if is_kept and self.turn.regather else None
        neighbours = self._conversions_of_neighbour(index, name)
        ragged = self.analysis.ragged[index].get(name, frozenset())
        is_order = self.analysis.orders[index].get(name) == name
        convert = np.full((len(types), len(types)), inf)
        np.fill_diagonal(convert, 0.0)
        costs: dict[tuple[str, str], float] = {}  # by kinds: which axis a shard is of makes no difference
        for start in dict.fromkeys(start_types):
            if role == "parameter" and start.kind == "S":
                continue  # a tensor dimension moves activations; gathering parameters is ZeRO's way
            row = []
            for target in types:
                kinds = start.kind, target.kind
                if kinds not in costs and start != target:
                    size = whole / neighbours.get(kinds, 1)
                    arguments = self, *kinds, info.differentiable, role, size, self.undoes[index]
                    cost = self.converted(DimProblem._converted, *arguments)
                    cost -= SENT_TOGETHER * PER_COLLECTIVE * (kinds in neighbours)
                    cost += self._saved(whole, start) * (kinds == gather)
                    costs[kinds] = calls * cost
                is_banned = bool(ragged) and moves_along(start, target, ragged, is_order=is_order)
                row.append(inf if is_banned else costs[kinds] if start != target else 0.0)
            convert[number[start]] = row
        regathered = [[(start.kind, target.kind) == gather for target in types] for start in types]
        return NetworkValue(
            source=source,
            made=_numbers(number, start_types),
            uses=tuple(
                Use(variable=variable, wanted=_numbers(number, wanted), kept=kept and is_kept)
                for variable, wanted, kept in uses
            ),
            convert=convert,
            forms=_numbers(number, [I if t.kind == "R" else t for t in types]),
            keep=np.array([calls * self._saved(whole, t) for t in types]),
            regathered=np.array(regathered),
        )

    def _saved(self, whole: float, form: Type) -> float:
        return self.prices.saved_byte_s / self.prices.unit_s * whole * self._part(form)

    def _conversions_of_neighbour(self, index: int, name: str) -> dict[tuple[str, str], int]:
        """Conversions of a value on the mesh dimension of this kind before this one, and by how much they shrink it."""
        before_it = [s for s in self.solved if owned_by(s.name) == owned_by(self.turn.name)]
        before = next((s for s in before_it if s.index == self.turn.index - 1), None)
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

    def _converted(
        self, source: Kind, target: Kind, differentiable: bool, role: str, whole: float, undoes: bool
    ) -> float:
        """Cost of one conversion in units. The sum of a parameter's gradient has no latency of its own."""
        sends = wire(source, target, differentiable)
        if role in ("constant", "buffer") and sends == (None, None):
            return PER_RANK
        seconds = self._wire_s(sends, whole, whole, gradient_latency=role != "parameter")
        if sends != (None, None):
            if undoes and source == "S" and target != "S":
                seconds += GATHERED_BATCH * self.prices.unit_s
            return seconds / self.prices.unit_s + PER_COLLECTIVE * sum(kind is not None for kind in sends)
        if {source, target} != {"I", "R"}:
            seconds += 2 * whole * self.prices.byte_s  # zeros are written, or a slice is copied
        return seconds / self.prices.unit_s + PER_MOVE

    def _wire_s(self, sends: Wire, forward: float, backward: float, *, gradient_latency: bool = True) -> float:
        ring, total = self.prices.ring, 0.0
        for kind, size, latency in ((sends[0], forward, True), (sends[1], backward, gradient_latency)):
            if kind is not None:
                total += ring.seconds(kind, size)
                total += ring.latency_of(kind) * self.prices.latency_scale * latency
        return total


def _plain(t: Type, differentiable: bool) -> Type:
    """The type without the difference between R and I, which only a cotangent makes."""
    return I if t.kind == "R" and not differentiable else t


def _numbers(number: Mapping[Type, int], types: Sequence[Type]) -> IntArray:
    return np.array([number[t] for t in types], dtype=np.intp)
