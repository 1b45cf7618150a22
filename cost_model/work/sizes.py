"""Sizes of a block's values as expressions: symbols of axes, divided by the degrees that split them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any

from autopar.capture.analysis import Analysis
from autopar.cost_model.work.autograd_probe import Piece
from autopar.cost_model.work.polynomials import Expr, symbol
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block
from autopar.ir.sharding import Dims, Mesh, Type, splits_samples
from autopar.memo import Memo
from autopar.rules.rule import Call, TensorInfo
from autopar.rules.variants import Bound, Variant, chosen_variants

Types = tuple[Type, ...]


@dataclass(frozen=True, eq=False)
class Naming:
    """The names of sizes.

    `by_size` names axes by their captured size; these sizes must be pairwise distinct. The batch is b sequences per
    data-parallel rank. The sequence is s tokens of each context rank. Any other axis is its captured number.

    If several mesh dimensions cut a sequence into several axes, the axis of a context dimension is its degree, the last
    axis is the rest of the sequence, and the other axes are numbers.
    """

    analysis: Analysis
    mesh: Mesh
    by_size: Mapping[int, Expr] = field(default_factory=dict)
    memo: Memo = field(default_factory=Memo, repr=False)  # operators share sizes

    @cached_property
    def degrees(self) -> tuple[Expr, ...]:
        """One symbol per mesh dimension: t for `tp`, d for data, else its own name. Degree 1 is the number 1."""
        import sympy

        return tuple(
            symbol({"tp": "t", "dp": "d"}.get(name, name)) if degree > 1 else sympy.Integer(1)
            for name, degree in zip(self.mesh.names, self.mesh.degrees, strict=True)
        )

    def axis(self, atom: int, size: int) -> Expr:
        """The size of an axis over all ranks."""
        return self.memo(self._axis, atom, size)

    def whole(self, dims: Dims) -> Expr:
        """Elements of a value over all ranks."""
        return self.memo(self._whole, dims)

    def divisor(self, types: Types) -> Expr:
        """The divisor of a value's elements on one rank under its types."""
        return self.memo(self._divisor, types)

    def of_keys(self, size: Expr) -> Expr:
        """A size of keys, of which a rank may see S tokens. Labels that split the sequence say what a rank sees."""
        return size if self.mesh.owning("sequence") else size.subs(symbol("s"), symbol("S"))

    def local(self, dims: Dims, types: Types) -> Expr:
        """Elements of a value on one rank."""
        return self.memo(self._local, dims, types)

    def axes(self, dims: Dims, types: Types) -> list[list[tuple[int, int, Expr]]]:
        """Every axis of every dimension of a value: its number, its captured size, its size on one rank."""
        return self.memo(self._axes, dims, types)

    def _local(self, dims: Dims, types: Types) -> Expr:
        return self.whole(dims) / self.divisor(types)

    def _axis(self, atom: int, size: int) -> Expr:
        import sympy

        if atom in self.analysis.batch_axes:
            return self._batch(atom)
        if size in self.by_size:
            return self.by_size[size]
        return self._sequence.get(atom, sympy.Integer(size))

    def _batch(self, atom: int) -> Expr:
        """The size of an axis of the batch. The last mesh dimension that splits the batch has the rest of it."""
        split = [i for i, name in enumerate(self.mesh.names) if splits_samples(name) and self.mesh.degrees[i] > 1]
        mine = self.analysis.meant_for.get(atom)
        if mine is None or mine not in split:
            return symbol("b") * prod(self.degrees[i] for i in split)
        return self.degrees[mine] * (symbol("b") if mine == split[-1] else 1)

    @cached_property
    def _sequence(self) -> Mapping[int, Expr]:
        """The size of every axis of a sequence."""
        context = self.mesh.owning("sequence")
        whole = prod((self.degrees[i] for i in context), start=symbol("s"))
        of_axes: dict[int, Expr] = dict.fromkeys(self.analysis.sequence_axes, whole)
        for dims in self.analysis.outer.values():
            for axes, sizes in zip(dims.axes, dims.sizes, strict=True):
                if len(axes) > 1 and set(axes) <= self.analysis.sequence_axes:
                    for atom, size in zip(axes, sizes, strict=True):
                        mine = self.analysis.meant_for.get(atom)
                        of_axes[atom] = self.degrees[mine] if mine in context else symbol("s") ** 0 * size
                    of_axes[axes[-1]] = whole / prod(of_axes[atom] for atom in axes[:-1])
        return of_axes

    def _whole(self, dims: Dims) -> Expr:
        import sympy

        pairs = (pair for d in range(len(dims.sizes)) for pair in zip(dims.axes[d], dims.sizes[d], strict=True))
        return prod((self.axis(atom, size) for atom, size in pairs), start=sympy.Integer(1))

    def _divisor(self, types: Types) -> Expr:
        import sympy

        shards = (d for t, d in zip(types, self.degrees, strict=True) if t.kind == "S")
        return prod(shards, start=sympy.Integer(1))

    def _axes(self, dims: Dims, types: Types) -> list[list[tuple[int, int, Expr]]]:
        local: list[list[tuple[int, int, Expr]]] = []
        for d, (sizes, axes) in enumerate(zip(dims.sizes, dims.axes, strict=True)):
            local.append([])
            for position, (size, atom) in enumerate(zip(sizes, axes, strict=True)):
                here = (t.kind == "S" and (t.dim, t.position) == (d, position) for t in types)
                degree = prod(deg for is_split, deg in zip(here, self.degrees, strict=True) if is_split)
                local[-1].append((atom, size, self.axis(atom, size) / degree))
        return local


@dataclass(frozen=True, eq=False, kw_only=True)
class NodeSizes:
    """One operator under its labels: its variant on every mesh dimension, and the sizes of its operands and output."""

    naming: Naming
    call: Call
    bound: Bound
    chosen: tuple[Variant, ...]
    dims: tuple[Dims, ...]  # of its operands, and of its output behind them
    known: dict[Piece, Expr] = field(default_factory=dict, repr=False)  # cached bytes

    @cached_property
    def infos(self) -> tuple[TensorInfo, ...]:
        return (*self.call.operands, self.call.output)

    @cached_property
    def types_of_values(self) -> tuple[Types, ...]:
        return tuple(zip(*((*v.operands, v.output) for v in self.chosen), strict=True))

    def types(self, k: int) -> Types:
        """Types of operand k, or of the output for -1."""
        return self.types_of_values[k]

    def elements(self, k: int) -> Expr:
        """Elements on one rank of operand k in the operator's types, or of the output for -1."""
        return self.naming.local(self.dims[k], self.types(k))

    def num_bytes(self, k: int) -> Expr:
        return self.elements(k) * self.infos[k].dtype.itemsize

    def factors(self) -> dict[str, Expr]:
        """The size of every factor on one rank."""
        sizes = {}
        for factor, atoms in self.bound.factors.items():
            size = prod((self.naming.axis(atom, n) for atom, n in atoms), start=symbol("b") ** 0)
            degree = prod(d for v, d in zip(self.chosen, self.naming.degrees, strict=True) if v.factor == factor)
            sizes[factor] = size / degree
        return sizes

    def piece_bytes(self, piece: Piece) -> Expr:
        """Bytes of a tensor inside the operator. Its size is matched to an operand, the output or a product of axes."""
        if piece not in self.known:
            self.known[piece] = self._piece_elements(piece) * piece.itemsize
        return self.known[piece]

    def _piece_elements(self, piece: Piece) -> Expr:
        import sympy

        order = [len(self.dims) - 1, *range(len(self.dims) - 1)]
        for find in (self._dims_or_ones, self._joined_dims):
            for k in order:
                found = find(piece, k)
                if found is not None:
                    return found
        atoms: dict[int, tuple[int, Any]] = {}
        for k in order:
            for dim in self._local_axes(k):
                for atom, size, local in dim:
                    atoms.setdefault(atom, (size, local))
        elements = prod(piece.shape)
        for count in range(len(atoms) + 1):
            for chosen in combinations(atoms.values(), count):
                if prod(size for size, _ in chosen) == elements:
                    return prod((local for _, local in chosen), start=sympy.Integer(1))
        return self.naming.by_size.get(elements, sympy.Integer(elements))

    def _local_axes(self, k: int) -> list[list[tuple[int, int, Expr]]]:
        return self.naming.axes(self.dims[k], self.types(k))

    def _dims_or_ones(self, piece: Piece, k: int) -> Expr | None:
        """The elements of a tensor if each of its dimensions equals the value's, or is 1 or expanded."""
        import sympy

        shape, local = self.infos[k].shape, sympy.Integer(1)
        if len(shape) != len(piece.shape):
            return None
        if shape == piece.shape:  # most are
            return self.elements(k)
        for size, full, dim in zip(piece.shape, shape, self._local_axes(k), strict=True):
            if size == full:
                local *= prod((local for *_, local in dim), start=sympy.Integer(1))
            elif size != 1:
                return None
        return local

    def _joined_dims(self, piece: Piece, k: int) -> Expr | None:
        """The elements of a tensor if its dimensions join consecutive dimensions of the value, all or the first."""
        import sympy

        rest, local = list(zip(self.infos[k].shape, self._local_axes(k), strict=True)), sympy.Integer(1)
        for size in piece.shape:
            joined = 1
            while joined < size and rest:
                width, dim = rest.pop(0)
                joined, local = joined * width, local * prod((local for *_, local in dim), start=sympy.Integer(1))
            if joined != size:
                return None
        return local


def sizes_of(block: Block, index: int, labels: BlockLabels, naming: Naming) -> Mapping[str, NodeSizes]:
    """The sizes of every operator of a block by name."""
    analysis, nodes = naming.analysis, {}
    for node in block.operators:
        bound = analysis.bounds[index][node.name]
        nodes[node.name] = NodeSizes(
            naming=naming,
            call=analysis.calls[index][node.name],
            bound=bound,
            chosen=chosen_variants(bound, labels.labels[node.meta["key"]], naming.mesh.degrees),
            dims=tuple(analysis.dims[index][name] for name in (*analysis.operands[index][node.name], node.name)),
        )
    return nodes
