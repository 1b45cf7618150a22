"""A model's own gradients: an export keeps the forward pass of a `torch.autograd.Function`, and no hook on gradients.

A function whose backward pass is the derivative of its forward pass loses nothing. Any other is refused, for example a
reversed gradient or a straight-through estimator. Reentrant activation checkpoints run as the code inside them. A hook
that `forward` registers on a gradient is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from autopar._torch.exports import applied_functions, gradient_hooks, inference_as_no_grad, without_tracing
from autopar._torch.private import pytree
from autopar.capture.export.source_lines import line_that_runs
from autopar.errors import CaptureError

_TOLERANCE = 1e-3  # a function may compute in half precision
_IN_FORWARD = "write it with detach(): a value v with the gradient of g is g + (v - g).detach()"
_Call = tuple[type[torch.autograd.Function], tuple[Any, ...]]


class _Context:
    """What a forward pass asks of its ``ctx`` if nothing has to be saved."""

    needs_input_grad = (True,) * 64

    def save_for_backward(self, *_: Any) -> None: ...
    def save_for_forward(self, *_: Any) -> None: ...
    def mark_dirty(self, *_: Any) -> None: ...
    def mark_non_differentiable(self, *_: Any) -> None: ...
    def set_materialize_grads(self, _: bool) -> None: ...


@contextmanager
def own_gradients(model: nn.Module, training: bool) -> Iterator[list[_Call]]:
    """A context of a trace that gives the calls of `seen_functions`. In training, a hook on a gradient is refused."""
    hooks = _hooks_refused(model) if training else nullcontext()
    with inference_as_no_grad(), hooks, seen_functions() as seen:
        yield seen


@contextmanager
def seen_functions() -> Iterator[list[_Call]]:
    """The calls of functions with a backward pass of their own, in the order in which the context runs them."""
    seen: list[_Call] = []

    def apply(cls: Any, plain: Callable[..., Any], *args: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:
            function, _, *own = args
            return function(*own)
        if not cls.__module__.startswith("torch.") and torch.is_grad_enabled():
            seen.append((cls, pytree.tree_map_only(torch.Tensor, _described, args)))
        return plain(*args)

    with applied_functions(apply):
        yield seen


def refuse_own_gradients(seen: list[_Call]) -> None:
    """Raise `CaptureError` for a function whose backward pass is not the derivative of its forward pass.

    Each function runs once on random values for each of its argument shapes.
    """
    checked: set[str] = set()
    for function, args in seen:
        key = f"{function.__module__}.{function.__qualname__} {args}"
        if key in checked:
            continue
        checked.add(key)
        name, reason = f"{function.__module__}.{function.__qualname__}", ""
        try:
            if not _is_derivative(function, args):
                reason = "its backward pass is not the derivative of its forward pass"
        except Exception as error:
            reason = f"it cannot be checked on random values ({type(error).__name__}: {str(error).splitlines()[0]})"
        if reason:
            raise CaptureError(
                f"the backward pass of {name} (an autograd.Function) would be lost, and {reason}; make it an operator "
                f"with torch.library.custom_op and register_autograd (docs/adding_an_operator.md), or {_IN_FORWARD}"
            )


def _hooks_refused(model: nn.Module) -> AbstractContextManager[None]:
    """A context of a trace in which a hook on a gradient, or on a saved tensor that it changes, is refused."""

    def refuse(*_: Any, **__: Any) -> None:
        line = line_that_runs(model)
        raise CaptureError(
            f"the model cannot be captured: {line}: `{line.code}` sets a hook on gradients in forward, and the "
            f"generated code would never call it; remove it, or {_IN_FORWARD}"
        )

    def is_lossless(pack: Callable[..., Any], unpack: Callable[..., Any]) -> bool:
        with without_tracing():
            value = torch.linspace(-1, 1, 64).view(8, 8)
            found = unpack(pack(value.clone()))
            return isinstance(found, torch.Tensor) and torch.equal(found, value)

    return gradient_hooks(refuse, is_lossless)


def _described(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(int(s) for s in tensor.shape), dtype=tensor.dtype, device="meta")


def _is_derivative(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function's gradients equal the gradients that autograd derives from its forward pass."""
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        torch.manual_seed(0)
        values = pytree.tree_map_only(torch.Tensor, _random, args)
        found = [_gradients(call, values) for call in (function.apply, _forward_of(function))]
    return all(torch.allclose(a, b, _TOLERANCE, _TOLERANCE, equal_nan=True) for a, b in zip(*found, strict=True))


def _forward_of(function: Any) -> Callable[..., Any]:
    if function.setup_context is not torch.autograd.Function.setup_context:
        forward: Callable[..., Any] = function.forward
        return forward
    return lambda *args: function.forward(_Context(), *args)


def _random(described: torch.Tensor) -> torch.Tensor:
    if described.dtype.is_floating_point:
        return torch.randn(described.shape, dtype=torch.float64)
    return torch.zeros(described.shape, dtype=described.dtype)


def _gradients(call: Callable[..., Any], values: tuple[Any, ...]) -> list[torch.Tensor]:
    """The gradients of all floating arguments for cotangents that depend on the shapes of the results only."""
    leaves, spec = pytree.tree_flatten(values)
    wanted = [one for one in leaves if isinstance(one, torch.Tensor) and one.is_floating_point()]
    inputs = {id(one): one.clone().requires_grad_() for one in wanted}
    copies = {key: one.clone() for key, one in inputs.items()}  # a function may change its arguments in place
    torch.manual_seed(1)
    results = call(*pytree.tree_unflatten([copies.get(id(one), one) for one in leaves], spec))
    flowing = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor) and r.is_floating_point()]
    generator = torch.Generator().manual_seed(2)
    total = sum((r * torch.randn(r.shape, generator=generator, dtype=r.dtype)).sum() for r in flowing)
    own = list(inputs.values())
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return [torch.zeros_like(one) for one in own]
    grads = torch.autograd.grad(total, own, allow_unused=True)
    return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(own, grads, strict=True)]
