"""The functions that generated code calls to convert a value: one autograd function for each row of the table.

Each function takes the local tensor, the mesh dimension and, for shards, the tensor dimension. Its forward and its
backward pass are two primitives. The table in `autopar.lowering.conversions` names them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.ir.sharding import Kind
from autopar.lowering.communicator import Communicator
from autopar.lowering.conversions import BY_FUNCTION, CONVERSIONS, Conversion, Primitive

_PrimitiveFunction = Callable[[torch.Tensor, Communicator, int, int], torch.Tensor]

# ---- primitives ----


def all_gather(x: torch.Tensor, mesh: Communicator, dim: int, to: int = 0) -> torch.Tensor:
    """The ranks' parts concatenated along `dim`, without a backward pass."""
    return joined_along(mesh.wait(mesh.start_all_gather(x)), mesh, dim)


def joined_along(gathered: torch.Tensor, mesh: Communicator, dim: int) -> torch.Tensor:
    """The ranks' parts, stacked along dimension 0, concatenated along `dim` instead."""
    if dim == 0:
        return gathered
    out: torch.Tensor = gathered.unflatten(0, (mesh.degree, -1)).movedim(0, dim).flatten(dim, dim + 1)
    return out


def split_first(x: torch.Tensor, mesh: Communicator, dim: int) -> torch.Tensor:
    """The ranks' chunks of `dim` stacked along dimension 0, as reduce-scatter and all-to-all take them."""
    if dim == 0:
        return x.contiguous()
    out: torch.Tensor = x.unflatten(dim, (mesh.degree, -1)).movedim(dim, 0).flatten(0, 1).contiguous()
    return out


def _slice(x: torch.Tensor, mesh: Communicator, dim: int, to: int) -> torch.Tensor:
    size = x.shape[dim] // mesh.degree
    return mesh.apply(x, lambda coordinate, part: part.narrow(dim, coordinate * size, size).contiguous())


def _place_in_zeros(x: torch.Tensor, mesh: Communicator, dim: int, to: int) -> torch.Tensor:
    def place(coordinate: int, part: torch.Tensor) -> torch.Tensor:
        shape = list(part.shape)
        shape[dim] *= mesh.degree
        whole = part.new_zeros(shape)
        whole.narrow(dim, coordinate * part.shape[dim], part.shape[dim]).copy_(part)
        return whole

    return mesh.apply(x, place)


def _first_rank_keeps(x: torch.Tensor, mesh: Communicator, dim: int, to: int) -> torch.Tensor:
    return mesh.apply(x, lambda coordinate, part: part.clone() if coordinate == 0 else torch.zeros_like(part))


def _all_to_all(x: torch.Tensor, mesh: Communicator, dim: int, to: int) -> torch.Tensor:
    received: torch.Tensor = mesh.all_to_all(split_first(x, mesh, to)).unflatten(0, (mesh.degree, -1))
    return received.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _all_to_all_back(x: torch.Tensor, mesh: Communicator, dim: int, to: int) -> torch.Tensor:
    return _all_to_all(x, mesh, to, dim)


_PRIMITIVES: Mapping[Primitive, _PrimitiveFunction] = {
    "nothing": lambda x, mesh, dim, to: x.view_as(x),
    "all_reduce": lambda x, mesh, dim, to: mesh.all_reduce(x),
    "all_gather": all_gather,
    "reduce_scatter": lambda x, mesh, dim, to: mesh.wait(mesh.start_reduce_scatter(split_first(x, mesh, dim))),
    "all_to_all": _all_to_all,
    "slice": _slice,
    "place_in_zeros": _place_in_zeros,
    "first_rank_keeps": _first_rank_keeps,
}

# ---- conversions ----


class Linear(torch.autograd.Function):
    """A linear function of a tensor and the function of its gradient. Both take the same other arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        forward: Callable[..., torch.Tensor],
        backward: Callable[..., torch.Tensor],
        *others: Any,
    ) -> torch.Tensor:
        ctx.backward_of = backward, others
        return forward(x, *others)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        backward, others = ctx.backward_of
        return backward(grads[0], *others), None, None, *(None for _ in others)


def _function(source: Kind, target: Kind) -> Callable[..., torch.Tensor]:
    """The function of a row, under the name by which generated code prints it."""
    row = CONVERSIONS[source, target]
    forward = _PRIMITIVES[row.forward]
    backward = _all_to_all_back if row.backward == "all_to_all" else _PRIMITIVES[row.backward]

    def convert(x: torch.Tensor, mesh: Communicator, dim: int = 0, to: int = 0) -> torch.Tensor:
        out: torch.Tensor = Linear.apply(x, forward, backward, mesh, dim, to)
        return out

    convert.__name__ = convert.__qualname__ = row.function
    words = [primitive.replace("_", " ") for primitive in (row.forward, row.backward)]
    convert.__doc__ = f"{source} -> {target}: {words[0]}; in the backward pass {words[1]}."
    return convert


CONVERT: Mapping[tuple[Kind, Kind], Callable[..., torch.Tensor]] = {pair: _function(*pair) for pair in CONVERSIONS}
invariant_to_replicate = CONVERT["I", "R"]
all_reduce_to_invariant = CONVERT["P", "I"]
all_reduce_to_replicate = CONVERT["P", "R"]
reduce_scatter = CONVERT["P", "S"]
all_gather_to_replicate = CONVERT["S", "R"]
all_gather_to_invariant = CONVERT["S", "I"]
shard_of_invariant = CONVERT["I", "S"]
all_to_all = CONVERT["S", "S"]
partial_of_invariant = CONVERT["I", "P"]
partial_of_shard = CONVERT["S", "P"]
replicate_to_invariant = CONVERT["R", "I"]
shard_of_replicate = CONVERT["R", "S"]
partial_of_replicate = CONVERT["R", "P"]


def conversion_of(target: Any) -> Conversion | None:
    """The conversion that a node of generated code makes, by the function that it calls; None of other nodes."""
    return BY_FUNCTION.get(getattr(target, "__name__", ""))
