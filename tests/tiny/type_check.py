"""Check 1: the `spmd_types` checker in global mode over generated blocks, at the real degrees of a plan.

Every operator of a generated graph runs on one rank's shapes under a fake process group. The checker derives its types,
which must equal the plan's types. Every conversion of `autopar.lowering.conversions` is replaced by its `spmd_types`
counterpart. The operand must have exactly the counterpart's source type. Global mode cannot follow some calls. They
pass through `local_map` regions with declared types, which the report lists and counts:

* views and strided pieces of a sharded value: merged dimensions with an inner shard, packed projections;
* operators rewritten for a split axis: vocabulary-parallel look-up and loss, means corrected by a divisor;
* rows that each rank sorts by expert, and products in groups;
* attention whose split heads share one head of keys, which broadcasts.

Global mode names tensor dimensions, not the axes within a dimension. It takes ``S(0.1)`` for ``S(0)``. One-process
equivalence proves the split axis, and the order of concatenation within a region.
"""

import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import fx

from autopar._torch import private
from autopar._torch.operators import aten
from autopar.capture.analysis import Analysis
from autopar.errors import VerificationError
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block, Program
from autopar.ir.sharding import Mesh, Type
from autopar.lowering.conversions import CONVERSIONS, Conversion
from autopar.lowering.functions import conversion_of
from autopar.lowering.gather_linear import gather_linear, kept_gather_linear
from autopar.lowering.graph_writer import REWRITES
from autopar.lowering.local_graph import LocalGraph
from autopar.lowering.loss_chunks import loss_in_chunks
from autopar.lowering.randomness import attention_with_dropout, dropout
from autopar.rules.grouped_product import GROUPED_MM
from autopar.rules.routed import ROUTED
from autopar.runtime.distributed.mesh import MeshDim, RankMesh, make_mesh
from autopar.testing.one_process import generate_all

_ATTENTION = aten.scaled_dot_product_attention.default
_Types = tuple[Type, ...]
_VIEWS = {
    aten.reshape.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.narrow.default,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.unflatten.int,
    aten.flatten.using_ints,
    aten.constant_pad_nd.default,
}
CREATES = {aten.full_like.default, aten.zeros_like.default, aten.ones_like.default}
# linear operators that the checker does not know as linear
LINEAR_UNKNOWN = {aten.to.dtype, aten.embedding.default, aten.constant_pad_nd.default, aten.slice.Tensor}
LINEAR_UNKNOWN |= {aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.index.Tensor}
LINEAR_UNKNOWN |= {aten.scaled_dot_product_attention.default, aten.tril.default, aten.triu.default}
LINEAR_BY_NAME = {"add", "sub", "neg", "clone", "sum", "mean", "cumsum", "cat", "stack", "transpose", "permute", "div"}
LINEAR_BY_NAME |= {"mul", "unsqueeze", "matmul", "mm", "bmm", "einsum", "flip", "roll", "gather", "index_select", "t"}
LINEAR_BY_NAME |= {"reshape", "select", "narrow", "repeat_interleave", "squeeze"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A call that the checker takes on declared types."""

    block: str
    node: str
    operator: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeReport:
    """The counts of derived operators and of conversions, and the regions with declared types."""

    mesh: Mesh
    num_operators: int
    num_conversions: int
    regions: tuple[Region, ...]
    errors: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.errors

    def counts(self) -> Mapping[str, int]:
        """Regions per operator and reason."""
        return Counter(f"{r.operator}: {r.reason}" for r in self.regions)

    def __str__(self) -> str:
        lines = [
            f"type check on {self.mesh.as_dict()}: {self.num_operators} operators derived, "
            f"{self.num_conversions} conversions, {len(self.regions)} regions taken as declared, {self.seconds:.1f} s"
        ]
        lines += [f"  {count} x {what}" for what, count in sorted(self.counts().items())]
        lines += [f"  refused: {error}" for error in self.errors]
        return "\n".join(lines)


def type_report(
    program: Program, analysis: Analysis, labels: Sequence[BlockLabels], mesh: Mesh, *, regather: bool = False
) -> TypeReport:
    """Type-check every distinct block of a program under its labels. Nothing is computed or sent."""
    generated = generate_all(program, analysis, labels, mesh, device="meta", regather=regather, join=False)
    return check_generated(program, analysis, generated, mesh)


def check_generated(program: Program, analysis: Analysis, generated: Sequence[LocalGraph], mesh: Mesh) -> TypeReport:
    """Type-check generated blocks; the first refusal of each block is reported."""
    spmd: Any = import_module("spmd_types")
    import_module("spmd_types.checker")
    began = time.perf_counter()
    checkers: list[_Checker] = []
    errors: list[str] = []
    with private.fake_world(mesh.size):
        ranks = make_mesh(mesh)
        for i, block in enumerate(program.blocks):
            checker = _Checker(spmd, analysis, i, block, generated[i], ranks)
            checkers.append(checker)
            try:
                with spmd.set_current_mesh(ranks.device_mesh), spmd.checker.typecheck(local=False):
                    checker.run_block()
            except (VerificationError, RuntimeError, ValueError, TypeError, AssertionError) as error:
                first = str(error).strip().split("\n")[0][:300]
                errors.append(f"block {block.name}, {checker.at}: {first}")
    return TypeReport(
        mesh=mesh,
        num_operators=sum(c.num_operators for c in checkers),
        num_conversions=sum(c.num_conversions for c in checkers),
        regions=tuple(r for c in checkers for r in c.regions),
        errors=tuple(errors),
        seconds=time.perf_counter() - began,
    )


class _Checker:
    """Runs one generated graph under the checker."""

    def __init__(
        self, spmd: Any, analysis: Analysis, index: int, block: Block, generated: LocalGraph, ranks: RankMesh
    ) -> None:
        self.spmd, self.block, self.ranks, self.graph = spmd, block, ranks, generated.graph
        self.generated = generated
        self.dims = analysis.dims[index]
        self.infos = {n.name: n.meta["info"] for n in block.graph.nodes if "info" in n.meta}
        flows = block.differentiable_ports
        self.differentiable = {port: port in flows for port in block.ports}
        self.axes = [ranks.dims[name] for name in ranks.spec.names]
        self.values: dict[fx.Node, Any] = {}
        self.regions: list[Region] = []
        self.num_operators = self.num_conversions = 0
        self.at = "ports"

    def run_block(self) -> None:
        for node in self.graph.nodes:
            self.at = f"operator {node.name}"
            if node.op == "placeholder":
                self.values[node] = self.port(node)
            elif node.op == "get_attr":
                self.values[node] = self.ranks.dims.get(str(node.target))  # None for a random stream
            elif node.op == "output":
                self.results(node)
            else:
                self.values[node] = self.call(node)

    # --- types ---------------------------------------------------------------------------------------------------

    def spmd_type(self, types: _Types, ndim: int) -> tuple[dict[Any, Any], Any]:
        """Our types in the checker's words: a local type per mesh dimension and a partition spec."""
        words = {"I": self.spmd.I, "R": self.spmd.R, "P": self.spmd.P, "S": self.spmd.V}
        local: dict[Any, Any] = {}
        entries: list[list[tuple[int, Any]]] = [[] for _ in range(ndim)]
        for axis, kind in zip(self.axes, types, strict=True):
            if axis.degree == 1:
                continue
            local[axis.group] = words[kind.kind]
            if kind.kind == "S":
                entries[kind.dim].append((kind.position, axis.group))
        spec = [None if not e else tuple(g for _, g in sorted(e, key=lambda x: x[0])) for e in entries]
        if not any(spec):
            return local, None
        return local, self.spmd.PartitionSpec(*(e[0] if e and len(e) == 1 else e for e in spec))

    def stamp(self, x: torch.Tensor, types: _Types) -> torch.Tensor:
        local, spec = self.spmd_type(types, x.dim())
        if local:
            self.spmd.assert_type(x, local, partition_spec=spec)
        return x

    def derived(self, x: torch.Tensor) -> list[tuple[str, int]]:
        """Kind and dimension per mesh dimension, as the checker has them; degree 1 fits everything."""
        found: list[tuple[str, int]] = []
        spec = self.spmd.get_partition_spec(x)
        for axis in self.axes:
            if axis.degree == 1:
                found.append(("", -1))
                continue
            kind = self.spmd.get_axis_local_type(x, axis.group).value
            where = -1
            for d, entry in enumerate(spec or ()):
                groups = entry if isinstance(entry, tuple) else (entry,)
                if any(g is not None and g == self.spmd.normalize_axis(axis.group) for g in groups):
                    kind, where = "S", d
            found.append((kind, where))
        return found

    def expect(self, x: torch.Tensor, types: _Types, what: str) -> None:
        """Refuse derived types that differ from the declared ones. Without a cotangent, I and R are the same."""
        for axis, (kind, dim), wanted in zip(self.axes, self.derived(x), types, strict=True):
            if not kind or (kind == wanted.kind and dim == wanted.dim):
                continue
            if {kind, wanted.kind} == {"I", "R"} and not x.requires_grad:
                continue
            got = f"S({dim})" if kind == "S" else kind
            raise VerificationError(f"{what} is {got} on {axis.name}, the plan says {wanted}")

    # --- nodes ---------------------------------------------------------------------------------------------------

    def port(self, node: fx.Node) -> Any:
        if node.name not in self.infos:
            return 0.5  # a scalar argument of the block
        info, types = self.infos[node.name], self.generated.ports[node.name]
        shape = self.dims[node.name].local_shape(types, self.ranks.spec.degrees)
        flows = self.differentiable[node.name] and info.dtype.is_floating_point
        return self.stamp(torch.empty(shape, dtype=info.dtype, device="meta", requires_grad=flows), types)

    def results(self, node: fx.Node) -> None:
        outputs = node.args[0]
        assert isinstance(outputs, tuple)
        for out, (name, types) in zip(outputs, self.generated.results.items(), strict=True):
            self.at = f"result {name}"
            value = self.values[out]
            shape = self.dims[name].local_shape(types, self.ranks.spec.degrees)
            if tuple(value.shape) != shape:
                raise VerificationError(f"the result has shape {tuple(value.shape)}, the plan says {shape}")
            self.expect(value, types, "the result")

    def call(self, node: fx.Node) -> Any:
        given: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self.values[n])
        args: tuple[Any, ...] = given[0]
        kwargs: dict[str, Any] = given[1]
        if node.target is operator.getitem:
            return args[0][args[1]]
        conversion = conversion_of(node.target)
        if conversion is not None:
            self.num_conversions += 1
            return self.convert(conversion, node.meta["types"], *args)
        if node.target in (gather_linear, kept_gather_linear):
            return self.gather_linear(*args)
        tensors = [v for v in _flat((args, kwargs)) if isinstance(v, torch.Tensor)]
        operand_types: Sequence[_Types] = node.meta.get("operand_types", ())
        for k, (x, wanted) in enumerate(zip(tensors, operand_types, strict=False)):
            self.expect(x, wanted, f"operand {k}")
        types: _Types = node.meta["types"]
        if node.target is dropout:  # a product with a mask that is drawn as the value is split
            self.num_operators += 1
            return torch.mul(args[0], self.stamp(torch.empty_like(args[0], requires_grad=False), types))
        reason = self.region_reason(node, tensors, types)
        if reason:
            return self.region(node, reason, args, kwargs)
        self.num_operators += 1
        out = self.operator(node.target, args, kwargs, operand_types)
        if not tensors:  # created: the same on all ranks, a part of it a shard by declaration
            return self.stamp(torch.empty(out.shape, dtype=out.dtype, device=out.device), types)
        self.expect(out, types, "the output")
        return out

    def operator(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operand_types: Sequence[_Types]
    ) -> torch.Tensor:
        """Call an operator under the checker; a partial bias joins a partial product by addition."""
        if target is aten.linear.default and any(t.kind == "P" for types in operand_types for t in types):
            product = torch.matmul(args[0], args[1].t())
            return product if len(args) < 3 or args[2] is None else torch.add(product, args[2])
        if target is attention_with_dropout:
            target, args = _ATTENTION, (*args[1:5], 0.0, *args[6:])
        if target is _ATTENTION and (args[5] if len(args) > 5 else kwargs.get("is_causal", False)):
            self.causal(args[0])
            kwargs = {k: v for k, v in kwargs.items() if k != "is_causal"}
            args = args[:5]
        out: torch.Tensor = spelled(target)(*args, **kwargs)
        return out

    def causal(self, query: torch.Tensor) -> None:
        """Refuse split queries under a causal mask. The checker itself only follows attention without a mask."""
        if any(kind == "S" and dim == query.dim() - 2 for kind, dim in self.derived(query)):
            raise VerificationError("causal attention whose queries are split: each rank's mask would begin at 0")

    def convert(
        self, conversion: Conversion, types: _Types, x: torch.Tensor, axis: MeshDim, *dims: int
    ) -> torch.Tensor:
        """The counterpart of a conversion, on an operand that must have exactly the source type."""
        if axis.degree == 1:
            return x
        name, source, target = conversion.function, conversion.source, conversion.target
        index = self.axes.index(axis)
        kind, dim = self.derived(x)[index]
        if kind != source and not ({kind, source} == {"I", "R"} and not x.requires_grad):
            raise VerificationError(f"{name} on {axis.name} meets {kind}, it converts {source}")
        if source == "S" and dim != dims[0]:
            raise VerificationError(f"{name} on {axis.name} joins dimension {dims[0]} of a shard of {dim}")
        words: dict[str, Any] = {"I": self.spmd.I, "R": self.spmd.R, "P": self.spmd.P}
        src = self.spmd.S(dims[0]) if source == "S" else words[source]
        dst = self.spmd.S(dims[-1]) if target == "S" else words[target]
        operation = conversion.wire[0] or "convert"  # spmd_types names its collectives as the table does
        options = {"expert_mode": True} if operation == "convert" else {}

        def body(value: torch.Tensor) -> torch.Tensor:
            function = getattr(self.spmd, operation)
            out: torch.Tensor = function(value.contiguous(), axis.group, src=src, dst=dst, **options)
            return out

        if not (self.outer(x, index) or (target == "S" and self.outer_of(types, index))):
            return body(x)
        # The checker redistributes only the innermost of several axes of a dimension.
        self.note(name, name, "outer of two shards of a dimension")
        wanted = tuple(
            types[index] if k == index else self.typed(k, have, x.requires_grad, types[k])
            for k, have in enumerate(self.derived(x))
        )
        wrap = self.spmd.no_typecheck(out_types=self.spmd_type(wanted, x.dim()))
        out: torch.Tensor = wrap(body)(x)
        return out

    def typed(self, index: int, have: tuple[str, int], flows: bool, wanted: Type) -> Type:
        """The declared type. For a value without a cotangent, the checker's choice of I or R replaces it."""
        if have[0] in ("I", "R") and wanted.kind in ("I", "R") and not flows:
            return Type("I") if have[0] == "I" else Type("R")
        return wanted

    def outer(self, x: torch.Tensor, index: int) -> bool:
        """Whether a mesh dimension splits a dimension, and another mesh dimension splits an inner axis of it."""
        group = self.spmd.normalize_axis(self.axes[index].group)
        entries = self.spmd.get_partition_spec(x) or ()
        return any(isinstance(e, tuple) and group in e and e[-1] != group for e in entries)

    def outer_of(self, types: _Types, index: int) -> bool:
        own = types[index]
        return any(
            t.kind == "S" and t.dim == own.dim and t.position > own.position and self.axes[k].degree > 1
            for k, t in enumerate(types)
            if k != index
        )

    def gather_linear(
        self, x: torch.Tensor, axis: MeshDim, dim: int, *weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The fused gather as a gather and its products."""
        self.num_conversions += 1
        types = tuple(Type(kind or "R", dim, 0) for kind, dim in self.derived(x))  # type: ignore[arg-type]
        types = tuple(Type("R") if a is axis else t for a, t in zip(self.axes, types, strict=True))
        whole = self.convert(CONVERSIONS["S", "R"], types, x, axis, dim)
        pairs = list(zip(weights[::2], weights[1::2], strict=True))
        self.num_operators += len(pairs)
        return tuple(torch.nn.functional.linear(whole, weight, bias) for weight, bias in pairs if weight is not None)

    # --- regions -------------------------------------------------------------------------------------------------

    def region_reason(self, node: fx.Node, tensors: Sequence[torch.Tensor], types: _Types) -> str:
        """The reason why global mode cannot follow a call, "" if it can."""
        if not tensors:
            return ""
        if node.target in REWRITES.values():
            return "rewritten for a split vocabulary or sequence"
        if node.target in ROUTED:
            return "rows sorted by each rank"
        if node.target is GROUPED_MM:
            return "a product in groups"
        if node.target is loss_in_chunks:
            return "a loss in chunks"
        if node.meta.get("rewritten"):
            return "divisor of a split mean"
        sharded = any(t.kind == "S" for t in types) or any(kind == "S" for x in tensors for kind, _ in self.derived(x))
        if node.target in _VIEWS and sharded:
            return "view of a shard"
        if node.target is aten.cat.default and sharded:
            dim = node.args[1] if len(node.args) > 1 else 0
            if any(kind == "S" and d == int(str(dim)) % tensors[0].dim() for kind, d in self.derived(tensors[0])):
                return "view of a shard"
        if node.target is aten.scaled_dot_product_attention.default and self.shares_keys(tensors):
            return "one key head for all heads"
        if node.target in LINEAR_UNKNOWN and any(kind == "P" for x in tensors for kind, _ in self.derived(x)):
            return "linear in a partial value"
        return "part of a new tensor" if node.target in CREATES and sharded else ""

    def shares_keys(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether split heads of queries meet one head of keys, which every rank has."""
        query, key = tensors[:2]
        kinds = [(q, k) for (q, _), (k, _) in zip(self.derived(query), self.derived(key), strict=True)]
        return key.shape[-3] == 1 < query.shape[-3] and any(q == "S" != k for q, k in kinds)

    def region(self, node: fx.Node, reason: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call between declared types: `local_map` for views, unchecked inside for rewrites."""
        self.note(node.name, _name(node.target), reason)
        tensors = [v for v in _flat((args, kwargs)) if isinstance(v, torch.Tensor)]
        target = spelled(node.target)

        def body(*_: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = target(*args, **kwargs)
            return out

        with self.spmd.no_typecheck():
            ndim = body().dim()
        flows = any(x.requires_grad for x in tensors)
        known = reason == "view of a shard" and node.target not in LINEAR_UNKNOWN - {aten.slice.Tensor}
        have = [kind for kind, _ in self.derived(tensors[0])]
        # split copies: a rank makes its own, so a replicate operand yields a shard
        split_copies = any(k in ("I", "R") and t.kind == "S" for k, t in zip(have, node.meta["types"], strict=True))
        wrap = self.spmd.local_map if known and not split_copies else self.spmd.no_typecheck
        declared = tuple(
            self.typed(k, self.derived(tensors[0])[k], flows, wanted) for k, wanted in enumerate(node.meta["types"])
        )
        out: torch.Tensor = wrap(out_types=self.spmd_type(declared, ndim))(body)(*tensors)
        return out

    def note(self, node: str, operator_name: str, reason: str) -> None:
        self.regions.append(Region(block=self.block.name, node=node, operator=operator_name, reason=reason))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in _flat(v)]
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in _flat(v)]
    return [value]


def _name(target: Any) -> str:
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


def spelled(target: Any) -> Callable[..., Any]:
    """An ATen operator as the public function by which the checker knows that it is linear."""
    name = _name(target)
    if name in ("expand", "to", "repeat"):
        method: Callable[..., Any] = getattr(torch.Tensor, name)
        return method
    if target is aten.slice.Tensor:
        return _narrow
    if name not in LINEAR_BY_NAME:
        operation: Callable[..., Any] = target
        return operation
    found: Callable[..., Any] = getattr(torch, name)
    return found


def _narrow(x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """A slice as `narrow`, which the checker knows."""
    if step != 1:
        return aten.slice.Tensor(x, dim, start, end, step)
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    return torch.narrow(x, dim, begin, stop - begin)
