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
from typing import Literal, NamedTuple, get_args

from autopar.ir.sharding import Kind

# in an exchange every rank sends its tensor to one other rank, in a shift to the next rank
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange", "shift"]
Primitive = Collective | Literal["nothing", "slice", "place_in_zeros", "first_rank_keeps"]
_COLLECTIVES: Mapping[str, Collective] = {name: name for name in get_args(Collective)}
Wire = tuple[Collective | None, Collective | None]  # the collectives of the forward and of the backward pass


class Conversion(NamedTuple):
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


_ROWS = (
    Conversion("I", "R", "invariant_to_replicate", "nothing", "all_reduce"),
    Conversion("P", "I", "all_reduce_to_invariant", "all_reduce", "nothing"),
    Conversion("P", "R", "all_reduce_to_replicate", "all_reduce", "all_reduce"),
    Conversion("P", "S", "reduce_scatter", "reduce_scatter", "all_gather"),
    Conversion("S", "R", "all_gather_to_replicate", "all_gather", "reduce_scatter"),
    Conversion("S", "I", "all_gather_to_invariant", "all_gather", "slice"),
    Conversion("I", "S", "shard_of_invariant", "slice", "all_gather"),
    Conversion("S", "S", "all_to_all", "all_to_all", "all_to_all"),
    Conversion("I", "P", "partial_of_invariant", "first_rank_keeps", "nothing"),
    Conversion("S", "P", "partial_of_shard", "place_in_zeros", "slice"),
    Conversion("R", "I", "replicate_to_invariant", "nothing", "first_rank_keeps"),
    Conversion("R", "S", "shard_of_replicate", "slice", "place_in_zeros"),
    Conversion("R", "P", "partial_of_replicate", "first_rank_keeps", "first_rank_keeps"),
)
CONVERSIONS: Mapping[tuple[Kind, Kind], Conversion] = {(row.source, row.target): row for row in _ROWS}
_OF_SORTED_ROWS = (
    Conversion("S", "S", "rows_to_experts", "all_to_all", "all_to_all"),
    Conversion("S", "S", "rows_to_tokens", "all_to_all", "all_to_all"),
)
BY_FUNCTION: Mapping[str, Conversion] = {row.function: row for row in (*_ROWS, *_OF_SORTED_ROWS)}


def wire(source: Kind, target: Kind, differentiable: bool) -> Wire:
    """The collectives of a conversion from one kind of type to another, forward and backward."""
    forward, backward = CONVERSIONS[source, target].wire
    return forward, backward if differentiable else None
