"""Named axes: every tensor dimension is an ordered product of axes.

A dimension starts as one *axis variable*. `Axes.unify` states that two sequences of variables cover the same
elements in the same order. An example is ``[rows] == [kv_heads, repeat, head_dim]``. Unification refines both
sides to their common cut points, so a variable ends as an ordered product of *atoms*. A variable of size 1 is the empty
product. Broadcasting, ``unsqueeze`` and ``keepdim`` then need no special case.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from autopar.ir.program import Block, Program
from autopar.ir.sharding import common_cuts

Variable = int
Atom = int


class Axes:
    """Union-find over axis variables in which a variable may be split into an ordered product of others."""

    def __init__(self) -> None:
        self._size: list[int] = []
        self._parent: list[Variable] = []
        self._children: list[tuple[Variable, ...] | None] = []

    def new(self, size: int) -> Variable:
        """A fresh variable for a dimension of `size` elements."""
        self._size.append(size)
        self._parent.append(len(self._parent))
        self._children.append(None)
        return len(self._size) - 1

    def size(self, variable: Variable) -> int:
        return self._size[variable]

    def root(self, variable: Variable) -> Variable:
        """The variable that stands for all that are known to be the same."""
        while self._parent[variable] != variable:
            self._parent[variable] = self._parent[self._parent[variable]]
            variable = self._parent[variable]
        return variable

    def atoms(self, variables: Variable | Iterable[Variable]) -> tuple[Atom, ...]:
        """The ordered atoms of a product of variables; atoms of size 1 are left out."""
        if isinstance(variables, int):
            root = self.root(variables)
            if self._children[root] is None:
                return (root,) if self._size[root] != 1 else ()
        stack = [variables] if isinstance(variables, int) else list(variables)
        roots: list[Atom] = []
        stack.reverse()
        while stack:
            root = self.root(stack.pop())
            children = self._children[root]
            if children is not None:
                stack.extend(reversed(children))
            elif self._size[root] != 1:
                roots.append(root)
        return tuple(roots)

    def split(self, atom: Atom, sizes: Sequence[int]) -> tuple[Atom, ...]:
        """Refine an atom into an ordered product of fresh atoms everywhere it occurs."""
        root = self.root(atom)
        assert self._children[root] is None and prod(sizes) == self._size[root]
        children = tuple(self.new(size) for size in sizes)
        self._children[root] = children
        return children

    def unify(self, left: Sequence[Variable], right: Sequence[Variable]) -> bool:
        """State that two products are the same dimension(s); False, and nothing done, where they cross."""
        if len(left) == len(right) == 1:  # most are single atoms
            a, b = self.root(left[0]), self.root(right[0])
            if a == b:
                return True
            if self._children[a] is None and self._children[b] is None and self._size[a] == self._size[b]:
                if self._size[a] != 1:
                    self._parent[b] = a
                return True
        sizes = common_cuts([self._size[a] for a in self.atoms(left)], [self._size[a] for a in self.atoms(right)])
        if sizes is None:
            return False
        self._refine(left, sizes)
        self._refine(right, sizes)
        left_atoms, right_atoms = self.atoms(left), self.atoms(right)
        if [self._size[a] for a in left_atoms] != [self._size[b] for b in right_atoms]:
            return False  # one axis occurs twice with different cuts
        for a, b in zip(left_atoms, right_atoms, strict=True):
            if a != b and self.root(a) != self.root(b):
                self._parent[self.root(b)] = self.root(a)
        return True

    def _refine(self, variables: Sequence[Variable], sizes: Sequence[int]) -> None:
        """Split the atoms of `variables` at the given cut points; a repeated atom may be split already."""
        start = 0
        for atom in self.atoms(variables):
            parts: list[int] = []
            covered = 1
            while covered < self._size[atom] and start < len(sizes):
                parts.append(sizes[start])
                covered *= sizes[start]
                start += 1
            if len(parts) > 1 and covered == self._size[atom] and self._children[self.root(atom)] is None:
                self.split(atom, parts)


def with_note_on_axes(program: Program, axes: Sequence[str]) -> Program:
    """The program, with a note if its blocks share other axes than `axes`, the `axes_of` blocks at other sizes."""
    differing = [b.name for b, other in zip(program.blocks, axes, strict=False) if axes_of(b) != other]
    if not differing and len(program.blocks) == len(axes):
        return program
    note = (
        f"axes of {differing or 'the blocks'} depend on the captured sizes, because some dimensions are equal by chance"
    )
    return replace(program, notes=(*program.notes, note))


def axes_of(block: Block) -> str:
    """The hash of the axes that a block's dimensions share, without sizes. Axes are numbered by first appearance."""
    numbers: dict[int, int] = {}
    pattern = [
        (name, [[numbers.setdefault(a, len(numbers)) for a in dim] for dim in dims.axes])
        for name, dims in block.dims.items()
    ]
    return hashlib.sha256(repr(pattern).encode()).hexdigest()
