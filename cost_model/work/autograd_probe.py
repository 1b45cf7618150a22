"""The kernels that torch's autograd launches for every operator of a block, and the tensors that it saves for backward.

A block's graph runs node by node on tensors without numbers, forward and backward. The meta device has shapes, strides
and storages. A kernel is a call that reaches torch's dispatcher and is no view of an operand. Saved tensors are read by
`torch.autograd.graph.saved_tensors_hooks`.

Two operators run as on a GPU, on every device. Dropout saves its mask (`native_dropout`). Attention is one kernel. It
saves queries, keys, values, its output and one float32 per query: the logarithm of the sum of exponentials. Sources:
Dao et al. 2022, "FlashAttention", algorithm 2; torch's derivatives.yaml, `_scaled_dot_product_flash_attention`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopar._torch.operators import aten
from autopar._torch.private import pytree, takes_device, watch_operators
from autopar.capture.analysis import Analysis
from autopar.cost_model.work.operator_cost import saved_operands, target_name
from autopar.ir.program import Block
from autopar.rules.rule import Call, TensorInfo
from autopar.rules.variants import Bound

_META = torch.device("meta")
ATTENTION_NAME = "scaled_dot_product_attention"
_NAMESPACES = ("aten", "autopar", "prims")
_STATISTICS = ("layer_norm", "group_norm")  # on a GPU their mean and deviation are float32 whatever the input is
_ALIASES = frozenset(["detach", "alias", "lift_fresh", "empty_like", "empty", "new_empty", "empty_strided"])


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor as a kernel or the backward pass reads it."""

    shape: tuple[int, ...]  # in memory: an expanded dimension has size 1
    itemsize: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor saved for the backward pass: the value that owns its memory, and the position of the operand."""

    value: str | None  # None if the operator made the tensor for itself
    operand: int  # -1 if the tensor is no operand
    piece: Piece


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One operator: the tensors of every kernel, forward and backward, and the saved tensors."""

    forward: tuple[tuple[Piece, ...], ...]
    backward: tuple[tuple[Piece, ...], ...]
    kept: tuple[Kept, ...]
    owner: str  # of the output's memory: the operator's own name, or the base of a view


def run_block(block: Block, index: int, analysis: Analysis) -> Mapping[str, NodeRun]:
    """The runs of a block's operators by name."""
    runs: dict[str, NodeRun] = {}
    run = _Run(analysis.operands[index], analysis.calls[index], analysis.bounds[index])
    for node in block.graph.nodes:
        if node.op == "placeholder" and "info" in node.meta:
            run.port(node)
        elif node.op == "placeholder":
            run.values[node.name] = 1.0  # a number that differs between calls of the block
        elif node.op == "call_function":
            runs[node.name] = run.node(node)
    return runs


class _Run:
    """Values of one run, which live until its end, and the value that owns each storage."""

    def __init__(
        self, operands: Mapping[str, tuple[str, ...]], calls: Mapping[str, Call], bounds: Mapping[str, Bound]
    ) -> None:
        self.operands, self.calls, self.bounds = operands, calls, bounds
        self.values: dict[str, Any] = {}
        self.owner: dict[int, str] = {}

    def port(self, node: fx.Node) -> None:
        info = node.meta["info"]
        self.values[node.name] = torch.empty(info.shape, dtype=info.dtype, device=_META)
        self.owner[_storage(self.values[node.name])] = node.name

    def node(self, node: fx.Node) -> NodeRun:
        """The kernels and saved tensors of an operator. Its output becomes a value."""
        call, names, info = self.calls[node.name], self.operands[node.name], node.meta["info"]
        leaves = {
            name: self.values[name].detach().requires_grad_(each.differentiable and each.dtype.is_floating_point)
            for name, each in zip(names, call.operands, strict=True)
        }
        saved: list[Any] = []
        kernels: list[tuple[Piece, ...]] = []
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        if target_name(node.target) == ATTENTION_NAME:
            out = _attention_output(info)
            kernels.append((*_pieces([*leaves.values(), out]), _lse(out)))
            backward = [(*_pieces([*leaves.values(), out, out, *wanted]), _lse(out))] if wanted else []
            kept = self._operands(names, [k for k, o in enumerate(call.operands) if o.dtype.is_floating_point])
            kept += [Kept(node.name, -1, _piece(out)), Kept(None, -1, _lse(out))]
            kept = kept if info.differentiable else []
        else:
            try:
                with _recording(saved), _watching(kernels):
                    out = _call(node, leaves, self.values)
                kept = self._kept(node, names, out, saved)
            except (RuntimeError, NotImplementedError, TypeError):  # no fake kernel: the rule gives the saved tensors
                out = torch.empty(info.shape, dtype=info.dtype, device=_META)
                kernels[:] = [_pieces([*leaves.values(), out])]
                kept = self._operands(names, saved_operands(call, self.bounds[node.name].rule))
            backward = _backward(out, wanted)
        if target_name(node.target) in _STATISTICS and len({info.dtype for info in call.operands}) == 1:
            kernels, backward = (_with_narrow_statistics(each, out.dtype.itemsize) for each in (kernels, backward))
        self.values[node.name] = out.detach()
        owner = self.owner.setdefault(_storage(out), node.name)
        return NodeRun(tuple(kernels), tuple(backward), tuple(kept), owner)

    def _kept(self, node: fx.Node, names: Sequence[str], out: Any, saved: Sequence[Any]) -> list[Kept]:
        by_storage = {_storage(self.values[name]): k for k, name in reversed(list(enumerate(names)))}
        statistics = target_name(node.target) in _STATISTICS
        by_storage_of: dict[int, Kept] = {}
        for tensor in saved:
            storage, piece = _storage(tensor), _piece(tensor)
            if storage in by_storage:
                kept = Kept(self.owner[storage], by_storage[storage], piece)
            elif storage == _storage(out):
                kept = Kept(node.name, -1, piece)
            else:
                kept = Kept(None, -1, replace(piece, itemsize=4) if statistics else piece)
            by_storage_of.setdefault(storage, kept)
        return list(by_storage_of.values())

    def _operands(self, names: Sequence[str], positions: Sequence[int]) -> list[Kept]:
        values = [(k, self.values[names[k]]) for k in positions]
        return [Kept(self.owner[_storage(value)], k, _piece(value)) for k, value in values]


def _with_narrow_statistics(kernels: Sequence[tuple[Piece, ...]], itemsize: int) -> list[tuple[Piece, ...]]:
    """Kernels that move statistics in the width of the input, as on a CPU, where the exported blocks were captured."""
    return [tuple(replace(p, itemsize=itemsize) if p.shape[-1:] == (1,) else p for p in kernel) for kernel in kernels]


def _call(node: fx.Node, leaves: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    def tensor(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return leaves.get(value.name, values.get(value.name))
        return _META if isinstance(value, torch.device) else value

    given: Any = map_aggregate((node.args, node.kwargs), tensor)
    args, kwargs = given[0], dict(given[1])
    if not leaves and takes_device(node.target):  # it makes a tensor, with numbers if not told otherwise
        kwargs["device"] = _META
    if node.target is aten.dropout.default and args[2] and args[1] > 0.0:
        return aten.native_dropout.default(args[0], args[1], True)[0]
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _attention_output(info: TensorInfo) -> Any:
    """Contiguous as (batch, queries, heads, width), as the kernels write it."""
    if len(info.shape) < 3:
        return torch.empty(info.shape, dtype=info.dtype, device=_META)
    *before, heads, queries, width = info.shape
    return torch.empty((*before, queries, heads, width), dtype=info.dtype, device=_META).transpose(-3, -2)


def _lse(out: Any) -> Piece:
    return Piece((*out.shape[:-1], 1), 4)


def _backward(out: Any, wanted: Sequence[Any]) -> list[tuple[Piece, ...]]:
    kernels: list[tuple[Piece, ...]] = []
    if out.requires_grad and wanted:
        grad = torch.empty_like(out)
        with _watching(kernels):
            torch.autograd.grad(out, wanted, grad, allow_unused=True)
    return kernels


@contextmanager
def _recording(saved: list[Any]) -> Iterator[None]:
    def keep(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


@contextmanager
def _watching(kernels: list[tuple[Piece, ...]]) -> Iterator[None]:
    def seen(name: str, arguments: dict[str, Any], out: Any) -> None:
        inputs, outputs = _tensors(arguments), _tensors(out)
        before = {_storage(each) for each in inputs}
        is_view = outputs and all(_storage(each) in before for each in outputs) and not name.endswith("_")
        if not is_view and name.split("::")[-1] not in _ALIASES:
            kernels.append(_pieces([*inputs, *outputs]))

    with watch_operators(_NAMESPACES, seen):
        yield


def _tensors(values: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _pieces(tensors: Sequence[Any]) -> tuple[Piece, ...]:
    return tuple(_piece(tensor) for tensor in tensors)


def _piece(tensor: Any) -> Piece:
    shape = tuple(size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Piece(shape, tensor.dtype.itemsize)


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)
