"""Parameters as their users see them: in the model's own shape, with hooks that get the gradient of a whole step."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autopar.ir.program import Program
from autopar.ir.storage import Storage
from autopar.runtime.parameters.factored import FactoredTensor, shown, stored
from autopar.runtime.parameters.flat_shards import FlatShards, as_shards
from autopar.runtime.parameters.joined import JoinedTensor, Joint
from autopar.runtime.parameters.packed import by_model_parameter
from autopar.runtime.parameters.whole_values import StageGradient

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


class FactoredStageGradient(StageGradient, FactoredTensor):
    __slots__ = ()


def parameters_of_model(program: Program, held: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters of the model by name, of those that this rank holds; a packed one joins its parts."""
    views: dict[str, nn.Parameter] = {}
    for name, infos in by_model_parameter(program):
        pieces = [held[info.name] for info in infos if info.name in held]
        if pieces and infos[0].part is None:
            views[name] = pieces[0]
        elif pieces:
            parts = [info.part for info in infos if info.part is not None]
            bounds = (*(part.start for part in parts), parts[-1].stop)
            joint = Joint(torch.Size(parts[0].shape), parts[0].dim, bounds)
            joined: Any = JoinedParameter.of(pieces, joint, name)
            views[name] = joined
    return views


def parts_of(parameter: nn.Parameter) -> tuple[Any, ...]:
    """The stored parameters of a parameter of the model: its parts, or itself."""
    return parameter.parts if isinstance(parameter, JoinedTensor) else (parameter,)


def flat_state(tensor: torch.Tensor, storage: Storage | None) -> Any:
    """A parameter of the model, or state shaped like it, in its flat shape. One of several parts has no `storage`."""
    if isinstance(tensor, JoinedTensor):
        return tensor.flat_shards()
    tensor = stored(tensor)
    if storage is None:
        return tensor
    if storage.is_factored and isinstance(tensor, DTensor):
        return as_shards(tensor, storage.dims.shape)
    return tensor if tensor.dim() == 0 or isinstance(tensor, DTensor) else tensor.reshape(storage.dims.shape)


def state_shards(tensor: torch.Tensor, storage: Storage | None) -> FlatShards:
    """The chunks of `flat_state`."""
    return as_shards(flat_state(tensor, storage))


def show_parameter(parameter: nn.Parameter, name: str, storage: Storage, *, has_two_meshes: bool = False) -> None:
    """Make a parameter what its user sees. It changes the object itself: FSDP2 and optimizers hold the object."""
    kind: Any = PlainParameter
    if isinstance(parameter, DTensor):
        shown(parameter, storage.dims.shape, name)
        kind = FactoredParameter
    parameter.__class__ = kind
    if isinstance(parameter, FactoredTensor):
        parameter.has_two_meshes = has_two_meshes


def show_gradient(parameter: nn.Parameter, *, in_stages: bool) -> None:
    """Show a parameter's gradient in the parameter's shape. With `in_stages` other ranks have other gradients."""
    for part in parts_of(parameter):
        grad = part.grad
        if isinstance(part, FactoredTensor) and grad is not None:
            assert isinstance(grad, DTensor)
            shown(grad, part.model_shape, part.model_name)
            grad.__class__ = FactoredStageGradient if in_stages else FactoredTensor
            grad.has_two_meshes = part.has_two_meshes  # type: ignore[attr-defined]
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
