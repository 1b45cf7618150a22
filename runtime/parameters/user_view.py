"""Parameters as their users see them: in the model's own shape, with hooks that get the gradient of a whole step."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autopar._torch import private
from autopar.ir.program import Program
from autopar.ir.storage import Storage
from autopar.runtime.parameters.flat_shards import Joint
from autopar.runtime.parameters.packed import by_model_parameter, joint_of
from autopar.runtime.parameters.shown_tensor import (
    FactoredTensor,
    JoinedTensor,
    ShownTensor,
    StageGradient,
    parts_of,
    refuse_norm,
    shown,
)

Hook = Callable[[Any], Any]


class UserParameter:
    """What a user may do with a parameter of any storage: register hooks. Mixed into the class of the parameter."""

    __slots__ = ()

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(gradient)`` with the gradient of every `forward_backward`; its result replaces the gradient."""
        return _registered(self, "gradient_hooks", hook)

    def register_post_accumulate_grad_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(parameter)`` after every `forward_backward`, when the gradient is summed over all ranks."""
        return _registered(self, "after_gradient_hooks", hook)


class PlainParameter(UserParameter, nn.Parameter):
    __slots__ = ()


class FactoredParameter(UserParameter, FactoredTensor):
    __slots__ = ()


class JoinedParameter(UserParameter, JoinedTensor):
    _is_param = True  # isinstance(parameter, nn.Parameter)


class PlainStageGradient(StageGradient, torch.Tensor):
    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_norm(func, sys._getframe(1))
        if any(issubclass(kind, ShownTensor) for kind in types):
            return NotImplemented  # the other operand knows how
        with private.without_torch_function():
            return func(*args, **(kwargs or {}))


class FactoredStageGradient(StageGradient, FactoredTensor):
    __slots__ = ()


def parameters_of_model(program: Program, held: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters of the model by name, of those that this rank holds; a packed one joins its parts."""
    views: dict[str, nn.Parameter] = {}
    for name, infos in by_model_parameter(program):
        pieces = [held[info.name] for info in infos if info.name in held]
        if pieces:
            joined: Any = JoinedParameter.of(pieces, joint_of(infos), name) if len(pieces) > 1 else pieces[0]
            views[name] = joined
    return views


def show_parameter(parameter: nn.Parameter, name: str, storage: Storage, *, has_two_meshes: bool = False) -> None:
    """Make a parameter what its user sees. It changes the object itself: FSDP2 and optimizers hold the object."""
    view: Any = shown([parameter], Joint(storage.dims.shape), name)
    view.__class__ = FactoredParameter if isinstance(parameter, DTensor) else PlainParameter
    view.has_two_meshes = has_two_meshes


def show_gradient(parameter: nn.Parameter, *, in_stages: bool) -> None:
    """Show a parameter's gradient in the parameter's shape. With `in_stages` other ranks have other gradients."""
    for part in parts_of(parameter):
        grad: Any = part.grad
        if isinstance(part, FactoredTensor) and grad is not None:
            shown([grad], part.joint)
            grad.__class__ = FactoredStageGradient if in_stages else FactoredTensor
            grad.model_name, grad.has_two_meshes = part.model_name, part.has_two_meshes
        elif in_stages and grad is not None:
            grad.__class__ = PlainStageGradient


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a hook waits for the parameter's gradient."""
    return bool(getattr(parameter, "gradient_hooks", None) or getattr(parameter, "after_gradient_hooks", None))


def run_hooks(parameter: nn.Parameter, kind: str, *, in_stages: bool) -> None:
    """Call the hooks of one kind: ``gradient_hooks`` or ``after_gradient_hooks``."""
    for hook in list(getattr(parameter, kind, {}).values()):
        if kind == "after_gradient_hooks":
            hook(parameter)
            continue
        changed = hook(parameter.grad)
        if changed is not None:
            parameter.grad = changed
            show_gradient(parameter, in_stages=in_stages)


def _registered(parameter: Any, kind: str, hook: Hook) -> RemovableHandle:
    if not parameter.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if not hasattr(parameter, kind):
        setattr(parameter, kind, OrderedDict())
    handle = RemovableHandle(getattr(parameter, kind))
    getattr(parameter, kind)[handle.id] = hook
    return handle
