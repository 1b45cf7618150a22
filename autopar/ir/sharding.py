"""SPMD types of values and the products of axes they refer to.

Per mesh dimension a value is ``I`` (invariant: equal on all ranks, so is its cotangent), ``R`` (replicate: equal
on all ranks, its cotangent is partial), ``P`` (partial: the value is the sum over ranks) or ``S(dim, position)``
(shard: the axis at `position` in the product of tensor dimension `dim` is split). The vocabulary is that of
`spmd_types`; `position` is ours, because a packed dimension such as ``(3 heads head_dim)`` is split on an inner axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

Kind = Literal["I", "R", "P", "S"]


@dataclass(frozen=True, slots=True, order=True)
class Type:
    """The type of a value on one mesh dimension; `dim` and `position` only mean something for shards."""

    kind: Kind
    dim: int = -1
    position: int = -1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.position == 0 else f"S({self.dim}.{self.position})"

    __repr__ = __str__

    @staticmethod
    def parse(text: str) -> "Type":
        """The inverse of `str`."""
        if text in ("I", "R", "P"):
            return {"I": I, "R": R, "P": P}[text]
        if not (text.startswith("S(") and text.endswith(")")):
            raise ValueError(f"not an SPMD type: {text!r}")
        dim, _, position = text[2:-1].partition(".")
        return S(int(dim), int(position or 0))


I = Type("I")  # noqa: E741  the field's name
R = Type("R")
P = Type("P")


def S(dim: int, position: int = 0) -> Type:
    """Shard of the axis at `position` in the product of dimension `dim`."""
    return Type("S", dim, position)


def chunk(size: int, degree: int) -> int:
    """Elements of an axis that one rank holds: all ranks hold as many, the last ones padding where it is uneven.

    The parts are those of `torch.chunk`: rank r's begin at r times this number.
    """
    return -(-size // degree)


@dataclass(frozen=True, slots=True)
class Dims:
    """A value's dimensions, each as the sizes of its ordered axes; a dimension of size 1 is the empty product.

    `axes` holds the identity of every axis, for telling batch from sequence from hidden; it plays no part in
    what a type means.
    """

    sizes: tuple[tuple[int, ...], ...]
    axes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(sizes) for sizes in self.sizes)

    def local_sizes(self, types: Sequence[Type], degrees: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Axis sizes of one rank's part under one type per mesh dimension, with its padding."""
        local = [list(sizes) for sizes in self.sizes]
        for kind, degree in zip(types, degrees, strict=True):
            if kind.kind == "S":
                local[kind.dim][kind.position] = chunk(local[kind.dim][kind.position], degree)
        return tuple(tuple(sizes) for sizes in local)

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

    def as_dict(self) -> Mapping[str, int]:
        return dict(zip(self.names, self.degrees, strict=True))
