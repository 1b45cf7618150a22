"""All uses of PyTorch's private modules while a model is exported."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from autopar._torch.names import private_names

with private_names():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
    from torch.fx import config
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.utils._python_dispatch import _disable_current_modes

_HOOKS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (torch.Tensor, ("register_hook", "register_post_accumulate_grad_hook")),
    (torch.nn.Module, ("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook")),
)
ENTER_AUTOCAST, EXIT_AUTOCAST = _enter_autocast, _exit_autocast  # the ends of traced regions
FAKE_TENSOR_LOG = FakeTensorMode.__module__  # the logger of failures in a trace


@contextmanager
def quick_export() -> Iterator[None]:
    """Export in half the time: nodes have no stack traces, and graph modules no code, which never runs."""
    with patch.object(config, "do_not_emit_stack_traces", True), _use_lazy_graph_module(True):
        yield


@contextmanager
def ctc_loss_traced() -> Iterator[None]:
    """A context in which `ctc_loss` is traced for tensors of lengths, as if every target had the length of all."""
    from torch._subclasses.fake_impls import op_implementations_dict

    def losses(mode: Any, operator: Any, log_probs: Any, targets: Any, *given: Any, **named: Any) -> tuple[Any, Any]:
        batch = tuple(log_probs.shape[1:-1])
        with mode:
            length = 2 * targets.shape[-1] + 1
            return log_probs.new_empty(batch), log_probs.new_empty((*batch, log_probs.shape[0], length))

    with patch.dict(op_implementations_dict, {torch.ops.aten._ctc_loss.Tensor: losses}):
        yield


@contextmanager
def flex_attention_by(function: Callable[..., Any]) -> Iterator[None]:
    """A context in which `flex_attention` calls `function` on every device, without compilation."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None:  # no model can call it
        yield
        return
    replaced = {
        "flex_attention_hop": function,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        "_validate_device": lambda *_: None,
        "setup_compilation_env": nullcontext,
    }
    with ExitStack() as stack, torch.compiler.set_stance("force_eager"):
        for name, value in replaced.items():
            stack.enter_context(patch.object(module, name, value))
        yield


def index_by_tensors() -> AbstractContextManager[Any]:
    """A context in which ``x[i]`` with a tensor i of no dimensions is an index operator, as `torch.vmap` needs it."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def as_exported() -> AbstractContextManager[None]:
    """A context in which `torch.compiler.is_compiling` and `torch.compiler.is_exporting` return True."""
    from torch._export.utils import _compiling_state_context

    return _compiling_state_context()


def traced_node(tensor: torch.Tensor) -> fx.Node | None:
    """The node of a tensor in the graph that is being traced. None if no graph is traced, or it lacks the tensor."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    if mode is None:
        return None
    node: fx.Node | None = get_proxy_slot(tensor, mode.tracer, None, lambda slot: slot.proxy.node)
    return node


def last_node(tensor: torch.Tensor) -> fx.Node | None:
    """The newest node of the graph that is being traced and has a tensor."""
    node = traced_node(tensor)
    return None if node is None else next(reversed(node.graph.nodes))


def like_traced(node: fx.Node) -> Any:
    """A tensor without values, gradients and history that is like the value of a node. Its memory is its own."""
    value = node.meta["val"]
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def tensor_of(node: fx.Node) -> Any:
    """A tensor that is the value of a node in the graph that is being traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    with torch._C._DisableTorchDispatch():
        tensor = like_traced(node).requires_grad_(node.meta["val"].is_floating_point())
    track_tensor_tree(tensor, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return tensor


def graph_with_backward(function: Callable[..., Any], leaves: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of a function of tensors that runs autograd. Passes without derivatives are decomposed."""
    from torch._decomp import decomposition_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parts = "backward", "aten.native_", "aten._native_batch_norm", "aten._fused_rms_norm", "aten.nll_loss"
    table: dict[Any, Any] = {op: fn for op, fn in decomposition_table.items() if any(part in str(op) for part in parts)}
    with ExitStack() as stack:
        for context in (_disable_current_modes(), torch._C.DisableTorchFunction(), sdpa_kernel(SDPBackend.MATH)):
            stack.enter_context(context)
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.enable_grad())
        return make_fx(function, decomposition_table=table)(*leaves)


def traced_constant(name: str) -> Any:
    """The value of an attribute of the module that is being traced. None without one."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else getattr(getattr(mode.tracer, "root", None), name, None)


@contextmanager
def without_tracing() -> Iterator[None]:
    """A context inside of a trace in which operators run on real tensors, and no graph records them."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


@contextmanager
def applied_functions(apply: Callable[..., Any]) -> Iterator[None]:
    """A context in which ``Function.apply`` calls ``apply(function, plain, *args)``; ``plain(*args)`` runs it."""
    from torch.autograd.function import _SingleLevelFunction

    def applied(cls: Any, *args: Any) -> Any:
        return apply(cls, super(_SingleLevelFunction, cls).apply, *args)

    with patch.object(_SingleLevelFunction, "apply", classmethod(applied)):
        yield


@contextmanager
def module_conversions(convert: Callable[..., Any]) -> Iterator[None]:
    """A context in which ``module.to(...)`` and the like call ``convert(module, function of a tensor)``."""

    def applied(module: torch.nn.Module, function: Callable[..., Any], *_: Any, **__: Any) -> Any:
        return convert(module, function)

    with patch.object(torch.nn.Module, "_apply", applied):
        yield


class _Node:
    """A node of autograd's graph that takes no hooks."""

    def __init__(self, node: Any, refuse: Callable[..., Any]) -> None:
        self._node, self.register_hook, self.register_prehook = node, refuse, refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


@contextmanager
def gradient_hooks(refuse: Callable[..., Any], is_lossless: Callable[..., bool]) -> Iterator[None]:
    """A context in which hooks on gradients, and saved-tensor hooks that are not lossless, call ``refuse()``."""
    saved: Any = torch.autograd.graph.saved_tensors_hooks
    plain: Any = torch.Tensor.grad_fn
    node_of, enter = plain.__get__, saved.__enter__

    def node(tensor: torch.Tensor) -> _Node | None:
        traced = node_of(tensor)
        return None if traced is None else _Node(traced, refuse)

    def entered(hooks: Any) -> Any:
        is_users = type(hooks) is saved or not type(hooks).__module__.startswith("torch.")
        if is_users and not is_lossless(hooks.pack_hook, hooks.unpack_hook):
            refuse()
        return enter(hooks)

    with ExitStack() as stack:
        for owner, names in _HOOKS:
            for name in names:
                stack.enter_context(patch.object(owner, name, refuse))
        stack.enter_context(patch.object(torch.Tensor, "grad_fn", property(node)))
        stack.enter_context(patch.object(saved, "__enter__", entered))
        yield


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """A context in which `torch.inference_mode` is a gradient mode that a trace records, as `torch.no_grad` is one."""

    def enter(mode: Any) -> None:
        mode._gradients = torch.set_grad_enabled(not mode.mode)

    def leave(mode: Any, *_: Any) -> None:
        mode._gradients.__exit__(*_)

    with (
        patch.object(torch.inference_mode, "__enter__", enter),
        patch.object(torch.inference_mode, "__exit__", leave),
    ):
        yield
