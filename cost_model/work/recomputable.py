"""What a block saves for its backward pass, operator by operator, and what it takes to compute an operator again.

A *value* here is a result in memory of its own, in the types in which it is saved or read. Autograd saves values, and
tensors that an operator makes for itself (the statistics of a norm, the mask of a dropout). If an operator is
recomputed (`autopar.lowering.recomputation`):

* its result and its own tensors are not saved;
* every value that it takes must be saved, or made by another recomputed operator.

The result of a collective is saved, never recomputed. Operators that send, results that leave the block and values that
the block is given are not recomputed either. Views belong to the operator whose memory they show.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Generic

from autopar.cost_model.work.block_work import Operator, SelectiveWork, V
from autopar.cost_model.work.fusion import Flow
from autopar.cost_model.work.polynomials import Expr, Polynomial, polynomial
from autopar.cost_model.work.sizes import Types
from autopar.lowering.conversions import wire
from autopar.rules.variants import exchanges


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedValue(Generic[V]):
    """A value: its bytes, the operator that can make it again, and whether autograd saves it."""

    num_bytes: V
    maker: int | None  # a position in `Recomputable.operators`; None if no operator can make the value again
    is_saved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputableOperator(Generic[V]):
    """An operator that can be recomputed."""

    keys: tuple[str, ...]  # the operator's key and the keys of the views of its result
    takes: tuple[int, ...]  # positions in `Recomputable.values`
    own_bytes: V  # of tensors that the operator makes for itself and autograd saves
    work: Operator[V]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputable(Generic[V]):
    """The values of a block and the operators that can be recomputed. `other_bytes` is saved in any case."""

    values: tuple[SavedValue[V], ...]
    operators: tuple[RecomputableOperator[V], ...]
    other_bytes: V


def recomputable(flow: Flow, works: Collection[Operator[Polynomial]]) -> Recomputable[Polynomial]:
    """The values and operators of a block. `works` has the work of its operators by their names."""
    return _Values(flow, works).found()


def selected(block: Recomputable[Polynomial], keys: Collection[str]) -> SelectiveWork[Polynomial]:
    """What a block saves and computes again if the operators with some of these `keys` are recomputed."""
    rerun = needed(block, {k for k, op in enumerate(block.operators) if op.keys[0] in keys})
    read = {value for k in rerun for value in block.operators[k].takes}
    kept = [
        v.num_bytes
        for at, v in enumerate(block.values)
        if (v.is_saved or at in read) and (v.maker is None or v.maker not in rerun)
    ]
    sums = [op.own_bytes for k, op in enumerate(block.operators) if k not in rerun]
    works = (block.operators[k].work for k in sorted(rerun))
    return SelectiveWork(
        saved_bytes=sum((*kept, *sums), start=block.other_bytes),
        operators=tuple(replace(op, backward_bytes=Polynomial(), kernels_backward=0) for op in works),
    )


def needed(block: Recomputable[Polynomial], rerun: Collection[int]) -> set[int]:
    """The recomputed operators that the backward pass runs: autograd or another one of them reads their tensors."""
    read = {v.maker for v in block.values if v.is_saved}
    inner: set[int] = set()
    for k in sorted(rerun, reverse=True):  # an operator takes values of earlier ones
        if k in read or block.operators[k].own_bytes.terms:
            inner.add(k)
            read.update(block.values[value].maker for value in block.operators[k].takes)
    return inner


class _Values:
    """Collects the values of a block."""

    def __init__(self, flow: Flow, works: Collection[Operator[Polynomial]]) -> None:
        self.flow = flow
        self.works = {op.name: op for op in works if op.kind != "again"}
        leaving = {self._owner(name) for name in flow.outputs}
        can = [n for n in flow.runs if self._owner(n) == n and n not in leaving and self._sends_nothing(n)]
        self.position = {name: k for k, name in enumerate(name for name in can if name in self.works)}
        self.values: dict[tuple[str, Expr, bool], tuple[int, Polynomial, int | None]] = {}  # position, bytes, maker
        self.saved: set[int] = set()
        self.own: dict[str, list[Polynomial]] = {}

    def found(self) -> Recomputable[Polynomial]:
        flow = self.flow
        for name in flow.runs:
            self._save(name)
        operators = []
        for name in self.position:
            edges = ((name, k) for k in range(len(flow.operands[name])))
            takes = dict.fromkeys(at for edge in edges if (at := self._read(edge, flow.use_types(edge))) is not None)
            operators.append(
                RecomputableOperator(
                    keys=tuple(flow.nodes[n].meta["key"] for n, run in flow.runs.items() if run.owner == name),
                    takes=tuple(takes),
                    own_bytes=sum(self.own.pop(name, ()), start=Polynomial()),
                    work=self.works[name],
                )
            )
        values = [
            SavedValue(num_bytes=size, maker=maker, is_saved=at in self.saved)
            for at, size, maker in self.values.values()
        ]
        others = (size for sizes in self.own.values() for size in sizes)
        return Recomputable(
            values=tuple(values), operators=tuple(operators), other_bytes=sum(others, start=Polynomial())
        )

    def _save(self, name: str) -> None:
        """The tensors that autograd saves for an operator."""
        flow = self.flow
        for kept in flow.runs[name].kept:
            of = name if kept.value is None else kept.value
            if flow.chunked is not None and of in {*flow.chunked.inside, flow.chunked.loss}:
                continue
            at: int | None = None
            if kept.value is None:
                piece = polynomial(flow.sizes[name].piece_bytes(kept.piece))
                self.own.setdefault(name, []).append(piece)
            elif kept.operand < 0:
                at = self._value(kept.value, flow.types(name), is_sent=False)
            else:
                at = self._read((name, kept.operand), flow.kept_types((name, kept.operand)))
            if at is not None:
                self.saved.add(at)

    def _read(self, edge: tuple[str, int], types: Types) -> int | None:
        """An operand in the `types` in which it is read. None if it is given to the block and needs no memory."""
        operand = self.flow.operands[edge[0]][edge[1]]
        return self._value(self._owner(operand), types, is_sent=_is_sent(self.flow.types(operand), types))

    def _value(self, owner: str, types: Types, *, is_sent: bool) -> int | None:
        flow = self.flow
        if flow.is_given(owner):
            return None
        key = owner, flow.naming.divisor(types), is_sent
        if key not in self.values:
            size = polynomial(flow.naming.local(flow.dims[owner], types) * flow.info(owner).dtype.itemsize)
            self.values[key] = len(self.values), size, None if is_sent else self.position.get(owner)
        return self.values[key][0]

    def _owner(self, name: str) -> str:
        """The value whose memory a value shows."""
        run = self.flow.runs.get(name)
        return name if run is None else run.owner

    def _sends_nothing(self, name: str) -> bool:
        flow, sizes = self.flow, self.flow.sizes[name]
        if flow.operators[name] == "linear" and _is_sent(flow.types(flow.operands[name][0]), flow.use_types((name, 0))):
            return False  # a gather is fused with its products
        degrees = zip(flow.naming.mesh.degrees, sizes.chosen, strict=True)
        rule = sizes.bound.rule
        return not any(
            degree > 1 and (variant.factor in rule.invariant or exchanges(rule, variant)) for degree, variant in degrees
        )


def _is_sent(before: Types, after: Types) -> bool:
    """Whether a conversion sends a collective in the forward pass."""
    return any(a != b and wire(a.kind, b.kind, True)[0] is not None for a, b in zip(before, after, strict=True))
