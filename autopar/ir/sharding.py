"""SPMD types of values, and the products of axes that the types refer to.

On each mesh dimension a value has one of four types:

* ``I``, invariant: the value is equal on all ranks, and so is its cotangent.
* ``R``, replicate: the value is equal on all ranks, and its cotangent is partial.
* ``P``, partial: the whole value is the sum over the ranks.
* ``S(dim, position)``, shard: tensor dimension `dim` is a product of axes. The axis at `position` is split.

Rows of tokens that are sorted by expert have a second kind of shard, printed ``S(0.1:experts)``. A rank then holds the
rows of its experts instead of the rows of its tokens. Their number depends on the data; the axis at `position` tells
how many rows are expected.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from autopar.errors import short_repr

Kind = Literal["I", "R", "P", "S"]
# What a mesh dimension owns. "batch": it splits samples only. "experts": it splits samples, and the parameters of
# experts. "sequence": it splits the sequence, and heads and experts inside of a block, but no parameters.
# "parameters": it splits any other axis.
Owned = Literal["batch", "experts", "sequence", "parameters"]
# a new kind of mesh dimension has its name here, and its meaning where `owned_by` is asked
_SHARD = re.compile(r"S\((\d{1,3})(?:\.(\d{1,3}))?(:experts)?\)", re.ASCII)
_OWNED: Mapping[str, Owned] = {"dp": "batch", "ep": "experts", "cp": "sequence"}


@dataclass(frozen=True, slots=True, order=True)
class Type:
    """The type of a value on one mesh dimension. `dim`, `position` and `by_expert` only mean something for shards."""

    kind: Kind
    dim: int = -1
    position: int = -1
    by_expert: bool = False

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        rows = ":experts" if self.by_expert else ""
        return f"S({self.dim}{rows})" if self.position == 0 else f"S({self.dim}.{self.position}{rows})"

    __repr__ = __str__

    @staticmethod
    def parse(text: object) -> "Type":
        """The inverse of `str`."""
        if text in ("I", "R", "P"):
            return {"I": I, "R": R, "P": P}[str(text)]
        match = _SHARD.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"not an SPMD type, which is text such as R or S(0): {short_repr(text)}")
        return Type("S", int(match[1]), int(match[2] or 0), bool(match[3]))


I = Type("I")  # noqa: E741  the field's name
R = Type("R")
P = Type("P")


def S(dim: int, position: int = 0) -> Type:
    """Shard of the axis at `position` in the product of dimension `dim`."""
    return Type("S", dim, position)


def moves_along(source: Type, target: Type, dims: frozenset[int], *, is_order: bool = False) -> bool:
    """Whether a conversion cuts or joins one of the ragged dimensions `dims` of a value (`autopar.rules.routed`)."""
    if source == target or not any(t.kind == "S" and t.dim in dims for t in (source, target)):
        return False
    if is_order:
        return source.kind == "S" or not target.by_expert
    are_shards = source.kind == target.kind == "S" and (source.dim, source.position) == (target.dim, target.position)
    return not (are_shards and source.by_expert != target.by_expert)


def owned_by(mesh_dim: str) -> Owned:
    """What a mesh dimension owns, by its name. Dimensions of one kind have many names: ``tp``, ``tp0``, ``tp0_tp1``."""
    return _OWNED.get(mesh_dim.partition("_")[0].rstrip("0123456789"), "parameters")


def shares_parameter(mesh_dim: str, stored: Type) -> bool:
    """Whether the ranks of a mesh dimension hold the same parameter, which is stored as `stored` on it."""
    return owned_by(mesh_dim) != "parameters" and stored.kind != "S"


_SAMPLES: tuple[Owned, ...] = ("batch", "experts")


def splits_samples(mesh_dim: str) -> bool:
    """Whether a mesh dimension splits the samples of a batch."""
    return owned_by(mesh_dim) in _SAMPLES


def chunk(size: int, degree: int) -> int:
    """Elements of an axis that every rank holds, as `torch.chunk` cuts it; the last ones hold padding if uneven."""
    return -(-size // degree)


def common_cuts(left: Sequence[int], right: Sequence[int]) -> list[int] | None:
    """Sizes of the common refinement of two factorisations of one number, or None where they cross."""
    if prod(left) != prod(right):
        return None
    cuts = sorted({prod(left[: i + 1]) for i in range(len(left))} | {prod(right[: i + 1]) for i in range(len(right))})
    sizes, previous = [], 1
    for cut in cuts:
        if cut % previous:
            return None
        if cut != previous:
            sizes.append(cut // previous)
        previous = cut
    return sizes


@dataclass(frozen=True, slots=True)
class Dims:
    """A value's dimensions, each as the sizes of its ordered axes; a dimension of size 1 is the empty product."""

    sizes: tuple[tuple[int, ...], ...]
    axes: tuple[tuple[int, ...], ...]  # the identity of every axis, which tells batch from sequence from hidden

    @staticmethod
    def plain(shape: Sequence[int]) -> "Dims":
        """The dimensions of a value on one device: each is one axis without an identity."""
        return Dims(tuple((size,) for size in shape), tuple((0,) for _ in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(sizes) for sizes in self.sizes)

    def axis_index(self, shard: Type) -> int:
        """The position of a shard's axis among the axes of all dimensions."""
        return sum(map(len, self.sizes[: shard.dim])) + shard.position

    def local_sizes(self, types: Sequence[Type], degrees: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Axis sizes of one rank's part under one type per mesh dimension, with its padding."""
        local = [list(sizes) for sizes in self.sizes]
        for kind, degree in zip(types, degrees, strict=True):
            if kind.kind == "S":
                local[kind.dim][kind.position] = chunk(local[kind.dim][kind.position], degree)
        return tuple(tuple(sizes) for sizes in local)

    def is_outermost(self, shard: Type, types: Sequence[Type], degrees: Sequence[int]) -> bool:
        """Whether a rank has one element of every axis before the shard's, so that its part is one range."""
        return prod(self.local_sizes(types, degrees)[shard.dim][: shard.position]) == 1

    def local_shape(self, types: Sequence[Type], degrees: Sequence[int]) -> tuple[int, ...]:
        """Shape of one rank's part under one type per mesh dimension."""
        return tuple(prod(sizes) for sizes in self.local_sizes(types, degrees))


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named mesh dimensions and their degrees, outermost first."""

    names: tuple[str, ...]
    degrees: tuple[int, ...]

    @staticmethod
    def of(**degrees: int) -> "Mesh":
        return Mesh(tuple(degrees), tuple(degrees.values()))

    @property
    def size(self) -> int:
        return prod(self.degrees)

    def joined(self, i: int) -> str | None:
        """The name of mesh dimensions i and i + 1 taken as one. None unless both own the same, and no samples."""
        pair = self.names[i : i + 2]
        kinds = {owned_by(name) for name in pair}
        if len(pair) < 2 or 1 in self.degrees[i : i + 2] or len(kinds) > 1 or not kinds.isdisjoint(_SAMPLES):
            return None
        return f"{self.names[i]}_{self.names[i + 1]}"

    def indices(self, name: str) -> tuple[int, ...]:
        """The mesh dimensions that a name, or the name of two joined ones, stands for."""
        if name in self.names:
            return (self.names.index(name),)
        return next((i, i + 1) for i in range(len(self.names)) if self.joined(i) == name)

    def degree_of(self, name: str) -> int:
        """The degree of a mesh dimension, or of two joined ones."""
        return prod(self.degrees[i] for i in self.indices(name))

    def owning(self, owned: Owned) -> list[int]:
        """The mesh dimensions, by place, that own the batch, the experts, the sequence or parameters' axes."""
        return [i for i, name in enumerate(self.names) if owned_by(name) == owned]

    def splitting(self, types: Sequence[Type]) -> list[int]:
        """The mesh dimensions, by place, that may split a parameter of these types: `ep` only if it does."""
        return [
            i
            for i, name in enumerate(self.names)
            if owned_by(name) == "parameters" or (owned_by(name) == "experts" and types[i].kind == "S")
        ]

    def as_dict(self) -> Mapping[str, int]:
        return dict(zip(self.names, self.degrees, strict=True))


def same(source: Type, target: Type, differentiable: bool) -> bool:
    """Whether no conversion is needed; without a cotangent I and R are one."""
    return source == target or (not differentiable and {source.kind, target.kind} == {"I", "R"})


def steps(dims: Dims, source: Sequence[Type], target: Sequence[Type], mesh: Mesh) -> list[tuple[int, ...]]:
    """The conversions of a value in order, as mesh dimensions: first those that shrink it, equal neighbours as one."""
    todo = [i for i in range(len(source)) if source[i] != target[i]]
    order: list[tuple[int, ...]] = []
    while todo:
        i = todo.pop(0)
        together = todo[:1] == [i + 1] and mesh.joined(i) is not None and _alike(dims, source, target, i, mesh)
        order.append((i, todo.pop(0)) if together else (i,))
    return sorted(order, key=lambda indices: target[indices[0]].kind != "S")


def _alike(dims: Dims, source: Sequence[Type], target: Sequence[Type], i: int, mesh: Mesh) -> bool:
    """Whether conversions on mesh dimensions i and i + 1 are of one kind, and their shards one contiguous part."""
    if (source[i].kind, target[i].kind) != (source[i + 1].kind, target[i + 1].kind):
        return False
    shards = [pair[i : i + 2] for pair in (source, target) if pair[i].kind == "S"]
    if len(shards) == 2:
        return False
    for outer, inner in shards:
        sizes = dims.sizes[outer.dim]
        if inner.dim != outer.dim or inner.position != outer.position + 1:
            return False
        if sizes[outer.position] != mesh.degrees[i] or sizes[inner.position] % mesh.degrees[i + 1]:
            return False
    return True
