"""The operators of a block that selective recomputation computes again: the exact choice, by an integer program.

    r[n] = 1    operator n is recomputed
    k[v] = 1    value v is saved

    saved bytes = Σ k[v]·bytes(v) + Σ (1 - r[n])·own_bytes(n)        cost = Σ r[n]·cost(n)

    k[v] + r[maker of v] ≥ 1       autograd saves v: it is saved, or made again
    k[v] + r[maker of v] ≥ r[n]    operator n takes v: to run again, it needs v saved or made again

A value without a maker is always saved if it is needed (`autopar.cost_model.work.recomputable`). Two questions are
asked of this model: the fewest bytes at a limit of cost (`fewest_bytes`), which is a knapsack, and the best exchange of
bytes for cost (`best_exchange`), which is a minimum cut, so that its linear relaxation is integral.
"""

from collections.abc import Sequence
from typing import Any

from autopar.cost_model.machine.machine import Speeds
from autopar.cost_model.work.block_work import BlockWork, Operator
from autopar.cost_model.work.recomputable import Recomputable
from autopar.search.labels.mixed_program import MixedProgram

MOST_FLOPS = 0.1  # more FLOP of a block, forward and backward, that selective recomputation may compute
_TIE = 1e-6  # weight of the quantity that decides between equal ones
_ROUNDING = 1e-9  # of a limit
_TOLERANCE = 2e-6  # of all bytes or cost: HiGHS keeps a limit to 1e-6
_TIME_LIMIT_S = 10.0


def fewest_bytes(block: Recomputable[float], costs: Sequence[float], most_cost: float) -> tuple[int, ...]:
    """The operators that leave the fewest saved bytes for at most this cost. Of equal sets the cheapest."""
    chosen = _solved(block, costs, cost_weight=_TIE, most_cost=most_cost)
    _, every = _sums(block, costs)
    if chosen is not None and sum(costs[n] for n in chosen) > most_cost + _ROUNDING * every:
        lower = max(0.0, most_cost - _TOLERANCE * every)
        chosen = _solved(block, costs, cost_weight=_TIE, most_cost=lower)
    assert chosen is not None  # to recompute nothing costs nothing
    return chosen


def best_exchange(block: Recomputable[float], costs: Sequence[float], bytes_per_cost: float) -> tuple[int, ...]:
    """The operators with the least sum of saved bytes and of cost, which counts `bytes_per_cost` bytes."""
    whole, every = _sums(block, costs)
    weight = bytes_per_cost * every / whole if whole else 1.0
    chosen = _solved(block, costs, cost_weight=weight, is_integral=True)
    assert chosen is not None
    return chosen


def saved_bytes(block: Recomputable[float], recomputed: Sequence[int]) -> float:
    """The bytes that a block saves if the operators at these positions are recomputed."""
    chosen = set(recomputed)
    read = {value for n in chosen for value in block.operators[n].takes}
    kept = (
        value.num_bytes
        for at, value in enumerate(block.values)
        if (value.is_saved or at in read) and value.maker not in chosen
    )
    own_bytes = (op.own_bytes for n, op in enumerate(block.operators) if n not in chosen)
    return block.other_bytes + sum(kept) + sum(own_bytes)


def keys_of(block: Recomputable[Any], recomputed: Sequence[int]) -> tuple[str, ...]:
    """The keys of operators, with the keys of the views of their results."""
    return tuple(key for n in recomputed for key in block.operators[n].keys)


def by_flops(block: Recomputable[float], work: BlockWork[float]) -> tuple[str, ...]:
    """The operators that leave the fewest saved bytes for `MOST_FLOPS` more FLOP. Only products count FLOP."""
    most = MOST_FLOPS * sum(op.passes * op.flops for op in work.products if op.kind != "again")
    moved = max((op.work.forward_bytes for op in block.operators), default=0.0)
    # bytes decide between operators without FLOP
    costs = [op.work.flops + (_TIE * most * op.work.forward_bytes / moved if moved else 0.0) for op in block.operators]
    return keys_of(block, fewest_bytes(block, costs, most))


def by_seconds(block: Recomputable[float], work: BlockWork[float], speeds: Speeds) -> tuple[str, ...]:
    """The operators that free more bytes for each second than full recomputation of the block does."""
    costs = [_seconds(op.work, speeds) for op in block.operators]
    whole = sum(_seconds(op, speeds) for op in (*work.products, *work.eager) if op.kind != "again")
    freed = saved_bytes(block, ()) - work.input_bytes
    if whole <= 0 or freed <= 0:
        return ()
    return keys_of(block, best_exchange(block, costs, freed / whole))


def _seconds(op: Operator[float], speeds: Speeds) -> float:
    """Seconds of an operator's forward pass at the device's rates."""
    moved = op.forward_bytes / speeds.bytes_per_s + op.kernels_forward * speeds.launch_s
    return max(op.flops / speeds.product_flops_per_s, moved)


def _sums(block: Recomputable[float], costs: Sequence[float]) -> tuple[float, float]:
    """All bytes and all cost, to scale the program."""
    whole = sum(value.num_bytes for value in block.values) + sum(op.own_bytes for op in block.operators)
    return whole, sum(costs) or 1.0


def _solved(
    block: Recomputable[float],
    costs: Sequence[float],
    *,
    cost_weight: float,
    most_cost: float | None = None,
    is_integral: bool = False,
) -> tuple[int, ...] | None:
    """The positions of the recomputed operators. The linear relaxation of an `is_integral` program has them too."""
    whole, every = _sums(block, costs)
    if not whole:
        return ()
    program = MixedProgram()
    column = program.continuous if is_integral else program.binary
    recomputed = [
        column(cost_weight * cost / every - operator.own_bytes / whole)
        for operator, cost in zip(block.operators, costs, strict=True)
    ]
    readers: dict[int, list[int]] = {}
    for n, operator in enumerate(block.operators):
        for place in operator.takes:
            readers.setdefault(place, []).append(n)
    for at, value in enumerate(block.values):
        if value.maker is None and value.is_saved:
            continue
        is_kept = program.continuous(value.num_bytes / whole)
        maker = [] if value.maker is None else [(recomputed[value.maker], -1.0)]
        if value.is_saved:
            program.at_most([(is_kept, -1.0), *maker], -1.0)
        for n in () if value.is_saved else readers.get(at, ()):
            program.at_most([(recomputed[n], 1.0), (is_kept, -1.0), *maker], 0.0)
    if most_cost is not None:
        program.at_most(
            ((n, cost / every) for n, cost in zip(recomputed, costs, strict=True)), most_cost / every * (1 + _ROUNDING)
        )
    solution = program.solve(_TIME_LIMIT_S)
    return None if solution is None else tuple(n for n, at in enumerate(recomputed) if solution[0][at] > 0.5)
