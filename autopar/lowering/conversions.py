"""The table of conversions: each changes a value's type on one mesh dimension, and may send a collective.

    from -> to   function of generated code   forward             backward
    I -> R       invariant_to_replicate       nothing             all-reduce
    P -> I       all_reduce_to_invariant      all-reduce          nothing
    P -> R       all_reduce_to_replicate      all-reduce          all-reduce
    P -> S       reduce_scatter               reduce-scatter      all-gather
    S -> R       all_gather_to_replicate      all-gather          reduce-scatter
    S -> I       all_gather_to_invariant      all-gather          slice
    I -> S       shard_of_invariant           slice               all-gather
    S -> S'      all_to_all                   all-to-all          all-to-all
    I -> P       partial_of_invariant         first rank keeps    nothing
    S -> P       partial_of_shard             place in zeros      slice
    R -> I       replicate_to_invariant       nothing             first rank keeps
    R -> S       shard_of_replicate           slice               place in zeros
    R -> P       partial_of_replicate         first rank keeps    first rank keeps

    Sorted rows, from the rank of their tokens to the rank of their expert, and back (`autopar.lowering.experts`):
    S -> S       rows_to_experts              all-to-all          all-to-all
    S -> S       rows_to_tokens               all-to-all          all-to-all

Generated code, its types, the prices of labels and the reports all read `CONVERSIONS`. The functions themselves are in
`autopar.lowering.functions`. This module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.ir.sharding import Kind

# in an exchange every rank sends its tensor to one other rank, in a shift to the next rank
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange", "shift"]
Primitive = Collective | Literal["nothing", "slice", "place_in_zeros", "first_rank_keeps"]
_COLLECTIVES: Mapping[str, Collective] = {name: name for name in get_args(Collective)}
Wire = tuple[Collective | None, Collective | None]  # the collectives of the forward and of the backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One row of the table: `forward` and `backward` are primitives of `autopar.lowering.functions`."""

    source: Kind
    target: Kind
    function: str
    forward: Primitive
    backward: Primitive

    @property
    def num_dims(self) -> int:
        """How many tensor dimensions the function takes: one for each shard."""
        return (self.source == "S") + (self.target == "S")

    @property
    def wire(self) -> Wire:
        """The collectives of the forward and of the backward pass, None if a pass sends nothing."""
        return _COLLECTIVES.get(self.forward), _COLLECTIVES.get(self.backward)


def _row(source: Kind, target: Kind, function: str, forward: Primitive, backward: Primitive) -> Conversion:
    return Conversion(source=source, target=target, function=function, forward=forward, backward=backward)


_ROWS = (
    _row("I", "R", "invariant_to_replicate", "nothing", "all_reduce"),
    _row("P", "I", "all_reduce_to_invariant", "all_reduce", "nothing"),
    _row("P", "R", "all_reduce_to_replicate", "all_reduce", "all_reduce"),
    _row("P", "S", "reduce_scatter", "reduce_scatter", "all_gather"),
    _row("S", "R", "all_gather_to_replicate", "all_gather", "reduce_scatter"),
    _row("S", "I", "all_gather_to_invariant", "all_gather", "slice"),
    _row("I", "S", "shard_of_invariant", "slice", "all_gather"),
    _row("S", "S", "all_to_all", "all_to_all", "all_to_all"),
    _row("I", "P", "partial_of_invariant", "first_rank_keeps", "nothing"),
    _row("S", "P", "partial_of_shard", "place_in_zeros", "slice"),
    _row("R", "I", "replicate_to_invariant", "nothing", "first_rank_keeps"),
    _row("R", "S", "shard_of_replicate", "slice", "place_in_zeros"),
    _row("R", "P", "partial_of_replicate", "first_rank_keeps", "first_rank_keeps"),
)
CONVERSIONS: Mapping[tuple[Kind, Kind], Conversion] = {(row.source, row.target): row for row in _ROWS}
_OF_SORTED_ROWS = (
    _row("S", "S", "rows_to_experts", "all_to_all", "all_to_all"),
    _row("S", "S", "rows_to_tokens", "all_to_all", "all_to_all"),
)
BY_FUNCTION: Mapping[str, Conversion] = {row.function: row for row in (*_ROWS, *_OF_SORTED_ROWS)}


def wire(source: Kind, target: Kind, differentiable: bool) -> Wire:
    """The collectives of a conversion from one kind of type to another, forward and backward."""
    forward, backward = CONVERSIONS[source, target].wire
    return forward, backward if differentiable else None
