"""Subclasses of `torch.autograd.Function` in a model: an export keeps their forward pass and drops their backward pass.

A function whose backward pass is the derivative of its forward pass loses nothing. The backward pass B of any other is
linear in the gradient, for example a surrogate, a reversed gradient or a straight-through estimator. Then the result is
written as f(detach(x)) + J(x - detach(x)), where J is the transpose of B. The second term is zero, and autograd's
gradient of it is B. Reentrant activation checkpoints run as the code inside them. A hook that `forward` registers on a
gradient is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from autopar._torch import exports
from autopar._torch.private import pytree
from autopar.capture.export.chosen_rows import chosen_of
from autopar.capture.export.inner_gradients import OWN_GRADIENT
from autopar.capture.export.source_lines import line_that_runs, refusal
from autopar.capture.nodes import closure, operator_name
from autopar.errors import CaptureError

_TOLERANCE = 1e-3  # a function may compute in half precision
_IN_FORWARD = "write it with detach(): a value v with the gradient of g is g + (v - g).detach()"
_SCALES = (1.0, 30.0)  # of the random values: a backward pass may clamp large values


class _Context(FunctionCtx):
    """The ``ctx`` of a forward and a backward pass that autograd does not call."""

    needs_input_grad = (True,) * 64
    to_save: tuple[Any, ...] = ()
    non_differentiable: tuple[Any, ...] = ()
    dirty_tensors: tuple[Any, ...] = ()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


@contextmanager
def own_gradients(model: nn.Module, *, training: bool) -> Iterator[None]:
    """A context in which functions with a backward pass of their own are traced with it."""
    are_derivatives: dict[str, bool] = {}

    def apply(cls: Any, plain: Callable[..., Any], *args: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:
            function, _, *rest = args
            return function(*rest)
        if next(chosen_of(args), None) is not None:
            kind = f"{cls.__qualname__} (an autograd.Function)"
            raise refusal(model, f"gives {kind} rows that data chooses; give it all rows")
        if not training or cls.__module__.startswith("torch.") or not torch.is_grad_enabled():
            return plain(*args)
        name, described = f"{cls.__module__}.{cls.__qualname__}", pytree.tree_map_only(Tensor, _described, args)
        key = f"{name} {described}"
        try:
            if key not in are_derivatives:
                with exports.without_tracing():
                    are_derivatives[key] = _is_derivative(cls, plain, described)
            return plain(*args) if are_derivatives[key] else _with_gradient(cls, args)
        except _TraceError as error:
            reason = str(error)
        except Exception:
            reason = "does more than operators of torch on its tensors do, such as a second run of modules"
        raise CaptureError(
            f"the model cannot be captured: {line_that_runs(model)}: the backward pass of {name} (an "
            f"autograd.Function) {reason}; make it an operator with torch.library.custom_op and register_autograd "
            "(docs/adding_an_operator.md)"
        )

    hooks = _hooks_refused(model) if training else nullcontext()
    with exports.inference_as_no_grad(), hooks, exports.applied_functions(apply):
        yield


class _TraceError(Exception):
    """The reason why a backward pass cannot be traced, as the end of a sentence about it."""


def _with_gradient(function: Any, args: tuple[Any, ...]) -> Any:
    """The results of a function in the graph that is being traced. They have the function's own gradient."""
    args = pytree.tree_map_only(Tensor, lambda leaf: leaf if exports.traced_node(leaf) else leaf.clone(), args)
    tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]  # lists of tensors have no gradient
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    state: dict[str, Any] = {}

    @torch.autograd.graph.allow_mutation_on_saved_tensors()  # a backward pass may change its operands in place
    def run(*given: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        values = iter(given[: len(tensors)])
        inputs = tuple(next(values) if isinstance(leaf, Tensor) else leaf for leaf in args)
        ctx = _Context()
        with torch.no_grad():
            outputs = _forward(function, ctx, inputs)
        results, state["spec"] = pytree.tree_flatten(outputs)
        if ctx.dirty_tensors:
            raise _TraceError("belongs to a forward pass that changes its operand in place")
        flows = [r.is_floating_point() and not any(r is c for c in ctx.non_differentiable) for r in results]
        cotangents = [torch.zeros_like(r).requires_grad_(flow) for r, flow in zip(results, flows, strict=True)]
        state["cotangents"] = [exports.traced_node(c) for c in cotangents]
        backward = getattr(function.backward, "__wrapped__", function.backward)  # of `once_differentiable`
        grads = backward(ctx, *cotangents)
        grads = grads if isinstance(grads, tuple) else (grads,)
        taken = [id(tensor) for tensor in given[: len(tensors)] if tensor.is_floating_point()]
        directions = dict(zip(taken, given[len(tensors) :], strict=True))
        pairs = [
            (grad.sum_to_size(value.shape), directions[id(value)])
            for grad, value in zip(grads, inputs, strict=False)
            if isinstance(grad, Tensor) and grad.requires_grad and id(value) in directions
        ]
        wanted = [c for c, flow in zip(cotangents, flows, strict=True) if flow]
        moved: Iterator[Tensor | None] = iter(())
        if pairs and wanted:
            moved = iter(torch.autograd.grad([g for g, _ in pairs], wanted, [u for _, u in pairs], allow_unused=True))
        return results, [next(moved, None) if flow else None for flow in flows]

    traced = [exports.traced_node(tensor) for tensor in (*tensors, *floating)]
    nodes = [node for node in traced if node is not None]
    if len(nodes) < len(traced):
        raise _TraceError("gets a tensor that no operator of torch made")
    module = exports.graph_with_backward(run, [exports.like_traced(node) for node in nodes])
    _check_linear(module, state["cotangents"])
    moves = [torch.nan_to_num(tensor - tensor.detach()) for tensor in floating]
    for move in moves:
        node = exports.traced_node(move)
        if node is not None:
            node.meta[OWN_GRADIENT] = True
    results, moved = fx.Interpreter(module).run(*(tensor.detach() for tensor in tensors), *moves)
    every = [r if m is None else r + m for r, m in zip(results, moved, strict=True)]
    return pytree.tree_unflatten(every, state["spec"])


def _check_linear(module: fx.GraphModule, cotangents: list[fx.Node]) -> None:
    """Raise `_TraceError` if the transpose of a backward pass depends on the gradient that it gets."""
    results: Any = module.graph.output_node().args[0]
    moved = results[1]
    for node in set(closure([node for node in moved if isinstance(node, fx.Node)])).difference(cotangents):
        reads = set(node.all_input_nodes).intersection(cotangents)
        if reads and not operator_name(node).endswith("_like") and not operator_name(node).startswith("new_"):
            raise _TraceError("is not linear in the gradient that it gets")


def _hooks_refused(model: nn.Module) -> AbstractContextManager[None]:
    """A context of a trace in which a hook on a gradient, or on a saved tensor that it changes, is refused."""

    def refuse(*_: Any, **__: Any) -> None:
        why = "the generated code would never call it"
        raise refusal(model, f"sets a hook on gradients in forward, and {why}; remove it, or {_IN_FORWARD}")

    def is_lossless(pack: Callable[..., Any], unpack: Callable[..., Any]) -> bool:
        with exports.without_tracing():
            value = torch.linspace(-1, 1, 64).view(8, 8)
            copy = unpack(pack(value.clone()))
            return isinstance(copy, torch.Tensor) and torch.equal(copy, value)

    return exports.gradient_hooks(refuse, is_lossless)


def _described(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(int(s) for s in tensor.shape), dtype=tensor.dtype, device="meta")


def _is_derivative(function: Any, plain: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function's gradients equal the gradients that autograd derives from its forward pass."""
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        for scale in _SCALES:
            torch.manual_seed(0)
            values = pytree.tree_map_only(Tensor, partial(_random, scale=scale), args)
            if any(grad.any() for grad in _gradients(plain, values, 0.0)):
                raise _TraceError("adds a gradient of its own to the gradient it gets; add such a term to the loss")
            exact = _gradients(plain, values)
            try:
                derived = _gradients(lambda *given: _forward(function, _Context(), given), values)
            except RuntimeError:  # such as of a value that the forward pass saves and then changes
                return False
            pairs = zip(exact, derived, strict=True)
            if not all(torch.allclose(a, b, _TOLERANCE, _TOLERANCE, equal_nan=True) for a, b in pairs):
                return False
    return True


def _forward(function: Any, ctx: _Context, args: tuple[Any, ...]) -> Any:
    if function.setup_context is torch.autograd.Function.setup_context:
        return function.forward(ctx, *args)
    result = function.forward(*args)
    function.setup_context(ctx, args, result)
    return result


def _random(described: Tensor, scale: float) -> Tensor:
    if described.dtype.is_floating_point:
        return torch.randn(described.shape, dtype=torch.float64) * scale
    return torch.zeros(described.shape, dtype=described.dtype)


def _gradients(call: Callable[..., Any], values: tuple[Any, ...], size: float = 1.0) -> list[Tensor]:
    """The gradients of all floating arguments for cotangents of a size that depend on the shapes of the results."""
    leaves, spec = pytree.tree_flatten(values)
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    inputs = {id(x): x.clone().requires_grad_() for x in wanted}
    copies = {key: x.clone() for key, x in inputs.items()}  # a function may change its arguments in place
    torch.manual_seed(1)
    results = call(*pytree.tree_unflatten([copies.get(id(x), x) for x in leaves], spec))
    flowing = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor) and r.is_floating_point()]
    generator = torch.Generator().manual_seed(2)
    total = sum((r * torch.randn(r.shape, generator=generator, dtype=r.dtype) * size).sum() for r in flowing)
    xs = list(inputs.values())
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return [torch.zeros_like(x) for x in xs]
    grads = torch.autograd.grad(total, xs, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(xs, grads, strict=True)]
