"""Conversions between SPMD types: one autograd function per row of the table of design section 4.

Every function takes the local tensor, the mesh dimension and, for shards, the tensor dimension. Forward and
backward are two primitives whose names say what is sent. Collectives are torch's functional ones.

    from -> to   forward             backward
    I -> R       nothing             all-reduce
    P -> I       all-reduce          nothing
    P -> R       all-reduce          all-reduce
    P -> S       reduce-scatter      all-gather
    S -> R       all-gather          reduce-scatter
    S -> I       all-gather          slice
    I -> S       slice               all-gather
    S -> S'      all-to-all          all-to-all
    I -> P       first rank keeps    nothing
    S -> P       place in zeros      slice
    R -> I       nothing             first rank keeps
    R -> S       slice               place in zeros
    R -> P       first rank keeps    first rank keeps
"""

from collections.abc import Callable
from typing import Any

import torch

from autopar.runtime.distributed.mesh import MeshDim

c10d = torch.ops._c10d_functional
_Primitive = Callable[[torch.Tensor, MeshDim, int, int], torch.Tensor]


def identity_(x: torch.Tensor, mesh: MeshDim, dim: int, to: int) -> torch.Tensor:
    return x.view_as(x)


def all_reduce_(x: torch.Tensor, mesh: MeshDim, dim: int, to: int) -> torch.Tensor:
    out: torch.Tensor = c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", mesh.group_name))
    return out


def start_all_gather(x: torch.Tensor, mesh: MeshDim) -> torch.Tensor:
    """Begin to gather along dimension 0; the result must be waited for."""
    out: torch.Tensor = c10d.all_gather_into_tensor(x.contiguous(), mesh.degree, mesh.group_name)
    return out


def start_reduce_scatter(x: torch.Tensor, mesh: MeshDim, dim: int) -> torch.Tensor:
    """Begin to sum and scatter along `dim`; the result must be waited for."""
    out: torch.Tensor = c10d.reduce_scatter_tensor(_split_first(x, mesh, dim), "sum", mesh.degree, mesh.group_name)
    return out


def ordered(gathered: torch.Tensor, mesh: MeshDim, dim: int) -> torch.Tensor:
    """Ranks' parts stacked along dimension 0, concatenated along `dim` instead."""
    if dim == 0:
        return gathered
    out: torch.Tensor = gathered.unflatten(0, (mesh.degree, -1)).movedim(0, dim).flatten(dim, dim + 1)
    return out


def all_gather_(x: torch.Tensor, mesh: MeshDim, dim: int, to: int) -> torch.Tensor:
    """Concatenate the ranks' parts along `dim`."""
    out: torch.Tensor = c10d.wait_tensor(start_all_gather(x, mesh))
    return ordered(out, mesh, dim)


def _split_first(x: torch.Tensor, mesh: MeshDim, dim: int) -> torch.Tensor:
    """Make `dim`'s rank-sized chunks the leading dimension, as reduce-scatter and all-to-all want them."""
    if dim == 0:
        return x.contiguous()
    out: torch.Tensor = x.unflatten(dim, (mesh.degree, -1)).movedim(dim, 0).flatten(0, 1).contiguous()
    return out


def reduce_scatter_(x: torch.Tensor, mesh: MeshDim, dim: int, to: int) -> torch.Tensor:
    """Sum over ranks and keep this rank's chunk of `dim`."""
    out: torch.Tensor = c10d.wait_tensor(start_reduce_scatter(x, mesh, dim))
    return out


def slice_(x: torch.Tensor, mesh: MeshDim, dim: int, to: int) -> torch.Tensor:
    """This rank's chunk of `dim`."""
    size = x.shape[dim] // mesh.degree
    return mesh.apply(x, lambda coordinate, part: part.narrow(dim, coordinate * size, size).contiguous())


def place_(x: torch.Tensor, mesh: MeshDim, dim: int, to: int) -> torch.Tensor:
    """This rank's chunk at its place in zeros."""

    def place(coordinate: int, part: torch.Tensor) -> torch.Tensor:
        shape = list(part.shape)
        shape[dim] *= mesh.degree
        whole = part.new_zeros(shape)
        whole.narrow(dim, coordinate * part.shape[dim], part.shape[dim]).copy_(part)
        return whole

    return mesh.apply(x, place)


def first_keeps_(x: torch.Tensor, mesh: MeshDim, dim: int, to: int) -> torch.Tensor:
    """The first rank keeps its value, the others hold zeros."""
    return mesh.apply(x, lambda coordinate, part: part.clone() if coordinate == 0 else torch.zeros_like(part))


def all_to_all_(x: torch.Tensor, mesh: MeshDim, dim: int, to: int) -> torch.Tensor:
    """Gather `dim` and split `to`: the shard moves from one tensor dimension to another."""
    parts = _split_first(x, mesh, to)
    sizes = [parts.shape[0] // mesh.degree] * mesh.degree
    out: torch.Tensor = c10d.wait_tensor(c10d.all_to_all_single(parts, sizes, sizes, mesh.group_name))
    received: torch.Tensor = out.unflatten(0, (mesh.degree, -1))
    return received.movedim(0, dim).flatten(dim, dim + 1).contiguous()


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: _Primitive, backward: _Primitive, mesh: MeshDim, dim: int, to: int
    ) -> torch.Tensor:
        ctx.backward_of = (backward, mesh, dim, to)
        return forward(x, mesh, dim, to)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        backward, mesh, dim, to = ctx.backward_of
        if backward is all_to_all_:
            dim, to = to, dim
        return backward(grads[0], mesh, dim, to), None, None, None, None, None


def _convert(
    x: torch.Tensor, forward: _Primitive, backward: _Primitive, mesh: MeshDim, dim: int = 0, to: int = 0
) -> torch.Tensor:
    out: torch.Tensor = _Convert.apply(x, forward, backward, mesh, dim, to)
    return out


def invariant_to_replicate(x: torch.Tensor, mesh: MeshDim) -> torch.Tensor:
    """I -> R: nothing; backward all-reduce."""
    return _convert(x, identity_, all_reduce_, mesh)


def all_reduce_to_invariant(x: torch.Tensor, mesh: MeshDim) -> torch.Tensor:
    """P -> I: all-reduce; backward nothing."""
    return _convert(x, all_reduce_, identity_, mesh)


def all_reduce_to_replicate(x: torch.Tensor, mesh: MeshDim) -> torch.Tensor:
    """P -> R: all-reduce; backward all-reduce."""
    return _convert(x, all_reduce_, all_reduce_, mesh)


def reduce_scatter(x: torch.Tensor, mesh: MeshDim, dim: int) -> torch.Tensor:
    """P -> S: reduce-scatter; backward all-gather."""
    return _convert(x, reduce_scatter_, all_gather_, mesh, dim)


def all_gather_to_replicate(x: torch.Tensor, mesh: MeshDim, dim: int) -> torch.Tensor:
    """S -> R: all-gather; backward reduce-scatter."""
    return _convert(x, all_gather_, reduce_scatter_, mesh, dim)


def all_gather_to_invariant(x: torch.Tensor, mesh: MeshDim, dim: int) -> torch.Tensor:
    """S -> I: all-gather; backward slice."""
    return _convert(x, all_gather_, slice_, mesh, dim)


def shard_of_invariant(x: torch.Tensor, mesh: MeshDim, dim: int) -> torch.Tensor:
    """I -> S: slice; backward all-gather."""
    return _convert(x, slice_, all_gather_, mesh, dim)


def all_to_all(x: torch.Tensor, mesh: MeshDim, dim: int, to: int) -> torch.Tensor:
    """S(dim) -> S(to): all-to-all; backward all-to-all."""
    return _convert(x, all_to_all_, all_to_all_, mesh, dim, to)


def partial_of_invariant(x: torch.Tensor, mesh: MeshDim) -> torch.Tensor:
    """I -> P: the first rank keeps; backward nothing."""
    return _convert(x, first_keeps_, identity_, mesh)


def partial_of_shard(x: torch.Tensor, mesh: MeshDim, dim: int) -> torch.Tensor:
    """S -> P: placed in zeros; backward slice."""
    return _convert(x, place_, slice_, mesh, dim)


def replicate_to_invariant(x: torch.Tensor, mesh: MeshDim) -> torch.Tensor:
    """R -> I: nothing; backward the first rank keeps."""
    return _convert(x, identity_, first_keeps_, mesh)


def shard_of_replicate(x: torch.Tensor, mesh: MeshDim, dim: int) -> torch.Tensor:
    """R -> S: slice; backward placed in zeros."""
    return _convert(x, slice_, place_, mesh, dim)


def partial_of_replicate(x: torch.Tensor, mesh: MeshDim) -> torch.Tensor:
    """R -> P: the first rank keeps; backward the first rank keeps."""
    return _convert(x, first_keeps_, first_keeps_, mesh)
