"""How parameters are stored over the ranks of a mesh, and in which buckets gradients are summed; without tensors.

A parameter whose split axis is not outermost in its dimension (GPT-2's packed ``(3 h e)``) is stored in *factored*
shape, ``(3, h·e, in)``, split on a dimension of its own. ZeRO splits one of the other dimensions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program, StateInfo
from autopar.ir.sharding import Dims, Mesh, Type, chunk

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How one parameter is stored."""

    dims: Dims
    types: tuple[Type, ...]  # one for each mesh dimension
    shape: tuple[int, ...]  # factored and global
    splits: tuple[int | None, ...]  # the split dimension of `shape`, for each of the mesh dimensions that may split it:
    degrees: tuple[int, ...]  # `ep` if it does, and the tensor dimensions
    local_shape: tuple[int, ...]  # of a block's part: flat, with padding
    deferred: tuple[str, ...]  # mesh dimensions that sum the gradient once a step
    expert_ranks: int = 1  # of `ep`, that split it

    @property
    def is_of_experts(self) -> bool:
        """Whether expert ranks split the parameter. ZeRO then shards it over the other data-parallel ranks."""
        return self.expert_ranks > 1

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The factored shape of one rank's part, padding included."""
        shape = list(self.shape)
        for split, degree in zip(self.splits, self.degrees, strict=True):
            if split is not None:
                shape[split] = chunk(shape[split], degree)
        return tuple(shape)

    def uneven(self) -> list[tuple[int, int, int]]:
        """Tensor mesh dimension, dimension and part size of every uneven shard."""
        return [
            (index, split, chunk(self.shape[split], degree))
            for index, (split, degree) in enumerate(zip(self.splits, self.degrees, strict=True))
            if split is not None and self.shape[split] % degree
        ]

    def own_shape(self, coordinates: Sequence[int]) -> tuple[int, ...]:
        """The factored shape of one rank's part. The last ranks of an uneven split store less, perhaps nothing."""
        shape = list(self.shape)
        for split, degree, at in zip(self.splits, self.degrees, coordinates, strict=True):
            if split is not None:
                size = chunk(shape[split], degree)
                shape[split] = max(0, min(size, shape[split] - size * at))
        return tuple(shape)

    def zero_dim(self, num_ranks: int) -> int | None:
        """The dimension of `shape` that ZeRO shards: the first that its ranks divide, else 0, padded.

        FSDP2 takes uneven parts of dimension 0 only, and combines with another shard of one dimension where that
        dimension is 0 and that shard even. None where nothing is left: such a parameter stays whole on data-parallel
        ranks.
        """
        sizes: list[int] = list(self.shape) if prod(self.shape) else []
        for split, degree in zip(self.splits, self.degrees, strict=True):
            if sizes and split is not None and degree > 1:
                even_first = split == 0 and self.shape[0] % degree == 0
                sizes[split] = sizes[split] // degree if even_first else 0
        fitting = [d for d, size in enumerate(sizes) if size and size % num_ranks == 0]
        if self.is_of_experts:  # with two shards of one dimension, torch gathers it twice
            fitting.sort(key=lambda d: d in self.splits)
        if fitting:
            return fitting[0]
        return 0 if sizes and sizes[0] else None


def zero_ranks(degrees: Degrees, storage: Storage) -> int:
    """Ranks that ZeRO shards a parameter over."""
    return degrees.expert_shard_ranks if storage.is_of_experts else degrees.shard_ranks


def zero_dim_of(degrees: Degrees, storage: Storage) -> int | None:
    """The dimension of a parameter that ZeRO shards. None to leave it whole, as experts that one rank holds."""
    if storage.is_of_experts and degrees.fsdp_stage_of_experts == 0:
        return None
    return storage.zero_dim(zero_ranks(degrees, storage))


def by_dtype(names: Iterable[str], infos: Mapping[str, StateInfo]) -> list[list[str]]:
    """Parameters that FSDP2 gathers together: the trained ones of a group have one dtype."""
    names = list(names)
    first = next((infos[n].dtype for n in names if infos[n].requires_grad), None)
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(infos[name].dtype if infos[name].requires_grad else first, []).append(name)
    return list(groups.values())


def storage_of(dims: Dims, types: Sequence[Type], mesh: Mesh) -> Storage:
    """How a parameter of the given storage types is stored."""
    tensor = [(types[i], mesh.degrees[i]) for i in mesh.splitting(types)]
    cuts: list[set[int]] = [set() for _ in dims.sizes]
    for t, degree in tensor:
        if t.kind == "S":
            sizes = dims.sizes[t.dim]
            cuts[t.dim] |= {t.position, t.position + 1} if sizes[t.position] % degree else {t.position}
    shape: list[int] = []
    begins: list[dict[int, int]] = []  # per dimension: position of an axis -> the factored dimension it begins
    for sizes, positions in zip(dims.sizes, cuts, strict=True):
        edges = sorted({0, *(p for p in positions if p < len(sizes))})
        begins.append({edge: len(shape) + k for k, edge in enumerate(edges)})
        shape += [prod(sizes[a:b]) for a, b in pairwise([*edges, len(sizes)])]
    degrees = zip(mesh.names, types, mesh.degrees, strict=True)
    return Storage(
        dims=dims,
        types=tuple(types),
        shape=tuple(shape),
        splits=tuple(begins[t.dim][t.position] if t.kind == "S" else None for t, _ in tensor),
        degrees=tuple(degree for _, degree in tensor),
        local_shape=dims.local_shape(types, mesh.degrees),
        deferred=tuple(n for n, t, degree in degrees if t.kind == "R" and degree > 1),
        expert_ranks=prod(mesh.degrees[i] for i in mesh.owning("experts") if types[i].kind == "S"),
    )


def buckets(tensors: Iterable[tuple[int, object]], most_bytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Indices of consecutive tensors, given as (bytes, dtype): of one dtype, at most `most_bytes` or one tensor."""
    group: list[int] = []
    size, kind = 0, None
    for index, (num_bytes, dtype) in enumerate(tensors):
        if group and (size + num_bytes > most_bytes or dtype != kind):
            yield group
            group, size = [], 0
        group.append(index)
        size, kind = size + num_bytes, dtype
    if group:
        yield group


def boundary_types(program: Program, labels: Sequence[BlockLabels]) -> Mapping[str, tuple[Type, ...]]:
    """The type of every parameter, input, constant and value that crosses blocks."""
    types: dict[str, tuple[Type, ...]] = {}
    for call in program.calls:
        block, typed = program.blocks[call.block], labels[call.block]
        pairs = [(typed.ports.get(p), a) for p, a in zip(block.ports, call.arguments, strict=True)]
        pairs += [(typed.results[o], r) for o, r in zip(block.outputs, call.results, strict=True)]
        for kinds, outer in pairs:
            if isinstance(outer, str) and kinds is not None:
                assert types.setdefault(outer, tuple(kinds)) == tuple(kinds), (outer, types[outer], kinds)
    return types
