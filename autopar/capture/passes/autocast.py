"""The casts of `torch.autocast`, written into the graph.

torch.export records the operators of an autocast region as they are called, and their results as autocast computes
them. The casts themselves are not in the graph. This pass runs every operator of a region under autocast on tensors
without data, sees which operands are cast, and puts these casts before the operator.

The result is checked operator by operator: without autocast, and with its operands cast, the operator must run the
same inner operators and give the same dtypes. An operator that casts values inside itself fails this check.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch import private
from autopar._torch.operators import aten
from autopar._torch.private import TorchDispatchMode, pytree
from autopar.capture.nodes import compute, value
from autopar.errors import CaptureError

REGION = "autocast"  # the key of a node's metadata


@dataclass(frozen=True, slots=True)
class Autocast:
    """The settings of a region: the type of its devices, and the dtype of 16 bits."""

    device_type: str
    dtype: torch.dtype


def ambient_autocast() -> tuple[Autocast, ...]:
    """The settings of the `torch.autocast` blocks around the caller."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple(Autocast(kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@contextmanager
def autocast_as(settings: Sequence[Autocast], *, enabled: bool = True) -> Iterator[None]:
    """`torch.autocast` blocks with some settings, or blocks that turn these off."""
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(torch.autocast(setting.device_type, dtype=setting.dtype, enabled=enabled))
        yield


def noted_region(settings: Sequence[Any]) -> dict[str, Any]:
    """The note on a region, for nodes that are taken out of it."""
    device_type, dtype, enabled = settings[:3]
    return {REGION: Autocast(device_type, dtype) if enabled else None}


def write_casts(graph: fx.Graph) -> None:
    """Put the casts of autocast before the operators of its regions. Raises `CaptureError` if that is impossible."""
    for node in list(graph.nodes):
        region: Autocast | None = node.meta.get(REGION)
        if region is not None and node.op == "call_function" and hasattr(node.target, "_schema"):
            _write_casts_of(node, region)


def _write_casts_of(node: fx.Node, region: Autocast) -> None:
    operands = [n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor)]
    tensors = {n: value(n) for n in operands}
    if not any(t.is_floating_point() and t.device.type == region.device_type for t in tensors.values()):
        return
    under = _run(node, tensors, region)
    if not under.casts and _dtypes(value(node)) == _dtypes(_run(node, tensors).result):
        return
    cast = {n: dtype for n in operands if (dtype := under.casts.get(private.storage_id(tensors[n]))) is not None}
    with torch.no_grad():
        given = tensors | {n: tensors[n].to(dtype) for n, dtype in cast.items()}
    dtype = _given_dtype(node, under, given)
    plain = _run(node, given, dtype=dtype)
    if _dtypes(plain.result) != _dtypes(under.result) or plain.inner != under.inner:
        raise CaptureError(
            f"torch.autocast casts values inside {node.target} ({_module(node)}), so the casts cannot be written "
            "before it; run this operator in a block of torch.autocast(..., enabled=False), or use "
            "plan={'precision': 'bf16'} instead of autocast"
        )
    for operand, low in cast.items():
        node.replace_input_with(operand, compute(node, aten.to.dtype, operand, low))
    if dtype is not None:
        node.kwargs = {**node.kwargs, "dtype": dtype}


class _OperatorRun(TorchDispatchMode):
    """A run of an operator: its result, casts of its operands or of views of them, and other inner operators."""

    def __init__(self, operands: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands = operands
        self.result: Any = None
        self.casts: dict[int, torch.dtype] = {}  # by storage
        self.inner: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = args[0] if args else None
        at = private.storage_id(first) if isinstance(first, torch.Tensor) else None
        if func is aten._to_copy.default and at in self.operands:
            assert at is not None
            self.casts[at] = result.dtype
        elif not func.is_view and func.namespace == "aten" and func is not aten.detach.default:
            self.inner.append(str(func))
        return result


def _run(
    node: fx.Node,
    tensors: dict[fx.Node, torch.Tensor],
    region: Autocast | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> _OperatorRun:
    """A node's operator on values of its operands, under autocast or without it."""
    given = lambda n: tensors[n] if n in tensors else value(n)  # noqa: E731
    args, kwargs = fx.map_arg(node.args, given), fx.map_arg(node.kwargs, given)
    kwargs = kwargs if dtype is None else {**kwargs, "dtype": dtype}
    ran = _OperatorRun({private.storage_id(t) for t in tensors.values()})
    kind, low = ("cpu", None) if region is None else (region.device_type, region.dtype)
    with torch.no_grad(), torch.autocast(kind, dtype=low, enabled=region is not None, cache_enabled=False), ran:
        ran.result = node.target(*args, **kwargs)  # type: ignore[operator]
    if node.target is aten._to_copy.default or str(node.target).startswith("aten.to."):
        ran.casts.clear()  # the cast that the model writes
    return ran


def _given_dtype(node: fx.Node, under: _OperatorRun, given: dict[fx.Node, torch.Tensor]) -> torch.dtype | None:
    """The dtype argument that autocast sets instead of casting the operand, as of a softmax on CUDA."""
    schema = node.target._schema  # type: ignore[union-attr]
    place = next((i for i, a in enumerate(schema.arguments) if a.name == "dtype"), None)
    results = _dtypes(under.result)
    if place is None or len(results) != 1 or len(node.args) > place or node.kwargs.get("dtype") is not None:
        return None
    return None if _dtypes(_run(node, given).result) == results else results[0]


def _dtypes(result: Any) -> tuple[torch.dtype, ...]:
    return tuple(leaf.dtype for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


def _module(node: fx.Node) -> str:
    stack: Any = node.meta.get("nn_module_stack") or {}
    names = [path for path, _ in stack.values()]
    return f"module {names[-1]!r}" if names and names[-1] else "the model itself"
