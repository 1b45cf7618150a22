"""Checks of `autopar doctor` that need no model: conversions on this job's ranks, compared with one rank.

Every rank draws the data of all ranks from one seed and computes alone what its own result should be. Values are small
integers, so sums are exact in any order and dtype: a conversion must be right to the last bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import NamedTuple

import torch
import torch.distributed as dist

from autopar.ir.sharding import Mesh
from autopar.lowering import functions
from autopar.runtime.distributed.mesh import MeshDim, RankMesh, make_mesh

RankTensors = list[torch.Tensor]  # one tensor for each rank of a mesh dimension
_DTYPES = {torch.float64: 512, torch.float32: 512, torch.bfloat16: 2}  # and the bound of the drawn integers
STEP_TOLERANCE = 1e-12  # of float64, relative to the largest value


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The name of a comparison, the largest difference on this rank, and the allowed difference."""

    name: str
    error: float
    tolerance: float = 0.0


# The result of a primitive on every rank's tensor, computed by one rank. Arguments: parts, dim, to.

Reference = Callable[[RankTensors, int, int], RankTensors]


def _nothing(parts: RankTensors, dim: int, to: int) -> RankTensors:
    return parts


def _all_reduce(parts: RankTensors, dim: int, to: int) -> RankTensors:
    return [torch.stack(parts).sum(0)] * len(parts)


def _reduce_scatter(parts: RankTensors, dim: int, to: int) -> RankTensors:
    return list(torch.stack(parts).sum(0).chunk(len(parts), dim))


def _all_gather(parts: RankTensors, dim: int, to: int) -> RankTensors:
    return [torch.cat(parts, dim)] * len(parts)


def _slice(parts: RankTensors, dim: int, to: int) -> RankTensors:
    return [part.chunk(len(parts), dim)[rank] for rank, part in enumerate(parts)]


def _place(parts: RankTensors, dim: int, to: int) -> RankTensors:
    zero = torch.zeros_like(parts[0])
    return [torch.cat([p if r == rank else zero for r in range(len(parts))], dim) for rank, p in enumerate(parts)]


def _first_keeps(parts: RankTensors, dim: int, to: int) -> RankTensors:
    return [part if rank == 0 else torch.zeros_like(part) for rank, part in enumerate(parts)]


def _all_to_all(parts: RankTensors, dim: int, to: int) -> RankTensors:
    chunks = [part.chunk(len(parts), to) for part in parts]
    return [torch.cat([chunk[rank] for chunk in chunks], dim) for rank in range(len(parts))]


class ConversionCase(NamedTuple):
    """A conversion and its correct results. The table is written anew: `doctor` must not read the one it checks."""

    name: str
    function: str
    forward: Reference
    backward: Reference
    num_dims: int = 0


CONVERSION_CASES = (
    ConversionCase("I -> R", "invariant_to_replicate", _nothing, _all_reduce),
    ConversionCase("P -> I", "all_reduce_to_invariant", _all_reduce, _nothing),
    ConversionCase("P -> R", "all_reduce_to_replicate", _all_reduce, _all_reduce),
    ConversionCase("P -> S", "reduce_scatter", _reduce_scatter, _all_gather, 1),
    ConversionCase("S -> R", "all_gather_to_replicate", _all_gather, _reduce_scatter, 1),
    ConversionCase("S -> I", "all_gather_to_invariant", _all_gather, _slice, 1),
    ConversionCase("I -> S", "shard_of_invariant", _slice, _all_gather, 1),
    ConversionCase("S -> S'", "all_to_all", _all_to_all, _all_to_all, 2),
    ConversionCase("I -> P", "partial_of_invariant", _first_keeps, _nothing),
    ConversionCase("S -> P", "partial_of_shard", _place, _slice, 1),
    ConversionCase("R -> I", "replicate_to_invariant", _nothing, _first_keeps),
    ConversionCase("R -> S", "shard_of_replicate", _slice, _place, 1),
    ConversionCase("R -> P", "partial_of_replicate", _first_keeps, _first_keeps),
)


def world_mesh(device_type: str) -> RankMesh:
    """All ranks on one mesh dimension. Collective."""
    return make_mesh(Mesh(("all",), (dist.get_world_size(),)), device_type)


def groups_to_check(world: RankMesh) -> dict[str, MeshDim]:
    """Groups by name: all ranks, and of an even number also neighbours and every second rank. Collective."""
    checked = {"all ranks": world.dims["all"]}
    world_size = dist.get_world_size()
    if world_size > 2 and world_size % 2 == 0:
        dims = make_mesh(Mesh(("dp", "tp"), (world_size // 2, 2)), world.device_type).dims
        checked |= {"two neighbours": dims["tp"], "every second rank": dims["dp"]}
    return checked


def check_conversion(row: ConversionCase, groups: dict[str, MeshDim], device: torch.device) -> Iterator[Difference]:
    """A row forward and backward on every group, in every dtype, along every tensor dimension. Collective."""
    cases = product(groups.items(), _DTYPES.items(), permutations((0, 1), row.num_dims))
    for (where, mesh), (dtype, high), dims in cases:
        generator = torch.Generator().manual_seed(len(where) + 31 * sum(dims))
        dim, to = (*dims, 0, 0)[:2]
        parts = _drawn((2 * mesh.degree, 3 * mesh.degree), mesh.degree, high, generator)
        results = row.forward(parts, dim, to)
        grads = _drawn(results[0].shape, mesh.degree, high, generator)
        wanted = row.backward(grads, *((to, dim) if row.num_dims == 2 else (dim, to)))[mesh.coordinate]
        x = parts[mesh.coordinate].to(device, dtype, copy=True).requires_grad_()
        y = getattr(functions, row.function)(x, mesh, *dims)
        y.backward(grads[mesh.coordinate].to(device, dtype))
        detail = f"{where}, {str(dtype).removeprefix('torch.')}" + (f", dimension {dims[0]}" if dims else "")
        yield Difference(name=f"forward on {detail}", error=_apart(y, results[mesh.coordinate]))
        yield Difference(name=f"backward on {detail}", error=_apart(x.grad, wanted))


def _drawn(shape: Sequence[int], num_ranks: int, high: int, generator: torch.Generator) -> RankTensors:
    values = (torch.randint(-high, high + 1, tuple(shape), generator=generator) for _ in range(num_ranks))
    return [value.to(torch.float64) for value in values]


def _apart(value: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """The largest difference. It is infinite if a tensor is missing or has another shape."""
    if value is None or value.shape != wanted.shape:
        return float("inf")
    difference = (value.detach().to("cpu", torch.float64) - wanted).abs().max()
    return float(difference) if not difference.isnan() else float("inf")


def relative(name: str, value: torch.Tensor, wanted: torch.Tensor) -> Difference:
    """The difference of a step's value from that of one rank."""
    scale = max(float(wanted.abs().max()), 1e-30)
    return Difference(name=name, error=_apart(value, wanted) / scale, tolerance=STEP_TOLERANCE)
