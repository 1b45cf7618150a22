"""`torch.autograd.grad` in a forward pass: gradient penalties, forces of potentials, residuals.

An export records no backward pass. So the graph that is recorded up to the call runs again on tensors without values,
and autograd's backward pass through it is recorded. Its operators join the graph of the model, and the step
differentiates them again.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch import exports
from autopar._torch.operators import aten
from autopar._torch.private import pytree
from autopar.capture.nodes import closure, is_random

OWN_GRADIENT = "own_gradient"  # marks the nodes of a function whose gradient has no derivative in the graph


class NotRecorded(Exception):
    """The reason why a gradient cannot be recorded, and the remedy."""


def gradient(arguments: Mapping[str, Any], leaves: Mapping[fx.Node, fx.Node]) -> tuple[Tensor | None, ...]:
    """The result of `torch.autograd.grad`, recorded in the traced graph. `leaves` require gradients after some node."""
    outputs, inputs = _several(arguments["outputs"]), _several(arguments["inputs"])
    cotangents = _several(arguments.get("grad_outputs")) or (None,) * len(outputs)
    if arguments.get("is_grads_batched"):
        raise NotRecorded("is_grads_batched is not recorded; call it for one vector at a time")
    ends, starts, given = (tuple(map(_node, tensors)) for tensors in (outputs, inputs, cotangents))
    run = _Run(ends, starts, given, {**{node: node for node in starts if node is not None}, **leaves})
    allow_unused = bool(arguments.get("allow_unused") or arguments.get("materialize_grads"))
    grads = run.replayed(*run.recorded(lambda o, i, g: torch.autograd.grad(o, i, g, allow_unused=allow_unused)))
    if arguments.get("materialize_grads"):
        grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]
    return tuple(g if g is None or arguments.get("create_graph") else g.detach() for g in grads)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A second run of the traced graph. `same` maps the nodes of its own graph to the nodes of the traced graph."""

    outputs: tuple[fx.Node | None, ...]
    inputs: tuple[fx.Node | None, ...]
    cotangents: tuple[fx.Node | None, ...]
    leaves: Mapping[fx.Node, fx.Node]
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    cuts: set[fx.Node] = field(default_factory=set)  # where the model itself stops gradients

    def recorded(self, differentiate: Callable[..., Any]) -> tuple[fx.GraphModule, list[fx.Node | None]]:
        """The graph of the run and of the backward pass, and its results."""
        nodes = list(next(node for node in (*self.outputs, *self.inputs) if node is not None).graph.nodes)
        if any(OWN_GRADIENT in node.meta for node in nodes):
            raise NotRecorded(
                "an autograd.Function before it has a backward pass of its own; write it with operators of torch"
            )
        begins: dict[fx.Node, list[fx.Node]] = {}
        for leaf, last in self.leaves.items():
            begins.setdefault(last, []).append(leaf)

        def run(*values: Tensor) -> Any:
            given = iter(values)
            env: dict[fx.Node, Any] = {}
            for node in nodes:
                env[node] = next(given) if node.op == "placeholder" else self._value(node, env)
                for leaf in begins.get(node, ()):
                    if not env[leaf].requires_grad:
                        env[leaf].requires_grad_()
                traced = exports.traced_node(env[node]) if isinstance(env[node], Tensor) else None
                if traced is not None:
                    self.same.setdefault(traced, node)
                    if node.target is aten.detach.default:
                        self.cuts.add(traced)
            given_nodes = self.outputs, self.inputs, self.cotangents
            with torch.enable_grad():
                out = differentiate(*([None if n is None else env[n] for n in n] for n in given_nodes))
            for node in nodes:  # the call may lie in regions
                if node.target is exports.ENTER_AUTOCAST and not node.users:
                    exports.EXIT_AUTOCAST(env[node])
            return out

        leaves = [exports.like_traced(node) for node in nodes if node.op == "placeholder"]
        module = exports.graph_with_backward(run, leaves)
        results: Any = module.graph.output_node().args[0]
        return module, list(results)

    def replayed(self, module: fx.GraphModule, results: Sequence[fx.Node | None]) -> list[Tensor | None]:
        """The results as tensors of the graph that is being traced, which gets the operators of the backward pass."""
        env: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            while node.target is aten.detach.default and node not in self.cuts:  # of a tensor that autograd saved
                node = node.all_input_nodes[0]
            if node not in env:
                env[node] = exports.tensor_of(self.same[node])
            return env[node]

        for node in self._needed(results):
            if node.op == "get_attr":
                env[node] = getattr(module, str(node.target))
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), value)
                env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                _check_derivative(node, env[node])
        return [None if node is None else value(node) for node in results]

    def _needed(self, results: Sequence[fx.Node | None]) -> list[fx.Node]:
        """The nodes that the traced graph lacks, in their order."""
        needed = closure((node for node in results if node is not None), without=self.same)
        if any(map(is_random, needed)):
            raise NotRecorded(
                "its backward pass needs the random numbers of the forward pass; turn dropout off in this part"
            )
        return needed

    def _value(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return exports.like_traced(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _check_derivative(node: fx.Node, result: Any) -> None:
    """Raise `NotRecorded` for a result through which autograd does not flow, though it depends on its operands."""
    for each in pytree.tree_leaves(result) if torch.is_grad_enabled() else ():
        is_lost = node.target is operator.getitem and not each.requires_grad and each.is_floating_point()
        if isinstance(each, Tensor) and (is_lost or (each.grad_fn and each.grad_fn.name() == "NotImplemented")):
            raise NotRecorded(f"torch has no second derivative of {node.target}; write this part with other operators")


def _several(given: Any) -> tuple[Any, ...]:
    return () if given is None else (given,) if isinstance(given, Tensor) else tuple(given)


def _node(tensor: Tensor | None) -> fx.Node | None:
    node = None if tensor is None else exports.traced_node(tensor)
    if tensor is not None and node is None:
        raise NotRecorded(
            "torch.func, or code outside of torch, made a tensor of this call; use torch.autograd.grad(..., "
            "create_graph=True) on tensors that operators of torch made, for all samples at once"
        )
    return node
