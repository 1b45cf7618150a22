"""The arguments of a loss function: the output of the model, a target, and more inputs of the batch.

`loss_fn(output)` gets the output alone. In a tuple of inputs, the last ones are the other arguments of
`loss_fn(output, target, weight)`. In a dict, the key `target` is the second argument, and every further argument has
its own name as key. The second argument of `loss_fn(output, batch)` is the whole dict. The result is the output `loss`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError

_Loss = Callable[..., torch.Tensor]
TARGET = "target"
BATCH = "batch"


def names_of_loss(loss_fn: _Loss | None) -> tuple[str, ...]:
    """The names of the last inputs of a tuple, which belong to the loss function. Its first one is the target."""
    if loss_fn is None:
        return ()
    every = _parameters(loss_fn)
    required = [p.name for p in every if p.default is p.empty]
    count = min(max(2, len(required)), len(every)) if every else 2  # the target of torch's losses may have a default
    return () if count < 2 else (TARGET, *(p.name for p in every[2:count]))


def outputs_with_loss(
    model: nn.Module, loss_fn: _Loss, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The outputs of the model and the loss. The inputs of a batch are the model's, and the loss function's others."""

    others: tuple[Any, ...] = ()
    more: Mapping[str, Any] = {}
    own = inspect.signature(model.forward).parameters
    if args:
        count = len(args) - len(names_of_loss(loss_fn))
        args, others = args[:count], tuple(args[count:])
    elif _takes_batch(loss_fn):
        takes_all = any(p.kind is p.VAR_KEYWORD for p in own.values())
        others = (dict(kwargs),)
        kwargs = {name: value for name, value in kwargs.items() if takes_all or name in own}
    else:
        wanted = [p for p in _parameters(loss_fn)[2:] if p.name in kwargs]
        more = {p.name: kwargs[p.name] for p in wanted if p.name not in own or p.default is p.empty}
        others = (kwargs[TARGET],) if names_of_loss(loss_fn) else ()
        kwargs = {name: value for name, value in kwargs.items() if name != TARGET and (name not in more or name in own)}
    out = model(*args, **kwargs)
    return _with_loss(out, loss_fn(out, *others, **more))


def check_loss_fn(model: nn.Module, loss_fn: _Loss, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `CaptureError` if a loss function has parameters, or if an argument of it is missing or ambiguous."""
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise CaptureError(
            f"loss_fn {type(loss_fn).__name__} has parameters, which no optimizer would see; make it part of the model"
        )
    wanted = names_of_loss(loss_fn)
    if not wanted or (kwargs and _takes_batch(loss_fn)):
        return
    signature = inspect.signature(model.forward).parameters
    if kwargs and TARGET in signature:
        raise CaptureError(f"the model has an input {TARGET!r} itself; pass example_inputs as a tuple, its target last")
    if (kwargs and TARGET not in kwargs) or not (args or kwargs):
        raise CaptureError(
            f"loss_fn needs a target: the last element of a tuple, or the key {TARGET!r} beside the model's inputs "
            f"{list(signature)}"
        )
    missing = [name for name in wanted[1:] if kwargs and name not in kwargs]
    if missing:
        raise CaptureError(f"loss_fn needs {missing[0]!r}; add this key to example_inputs, or give it a default")
    positional = [p for p in signature.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    if args and len(args) - len(wanted) < len(required):
        what = "a target" if len(wanted) == 1 else f"{list(wanted)}"
        raise CaptureError(f"loss_fn needs {what} after the model's inputs {required}; {len(args)} values were given")


def _takes_batch(loss_fn: _Loss) -> bool:
    every = _parameters(loss_fn)
    return len(every) > 1 and every[1].name == BATCH


def _parameters(loss_fn: _Loss) -> list[inspect.Parameter]:
    """The positional parameters of a loss function. Empty if Python does not know them."""
    try:
        signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in signature.parameters.values() if p.kind in kinds]


def named_outputs(out: Any) -> dict[str, torch.Tensor]:
    """The tensors of a module's output by name: mapping keys, or positions. The loss has the name ``loss``."""
    outputs = _tensors(out)
    if "loss" in outputs or len(outputs) == 1:
        name = "loss" if "loss" in outputs else next(iter(outputs))
        outputs = outputs | {name: _without_dimension(outputs[name])}
    if "loss" not in outputs:
        scalars = [name for name, v in outputs.items() if v.dim() == 0 and v.dtype.is_floating_point]
        if len(scalars) == 1:
            outputs = {"loss" if name == scalars[0] else name: v for name, v in outputs.items()}
    return outputs


def _without_dimension(loss: Any) -> Any:
    """A loss of the shape (1,) without its dimension: autograd takes both."""
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.shape == (1,) else loss


def is_loss(value: Any) -> bool:
    """Whether a value is a floating scalar."""
    return isinstance(value, torch.Tensor) and not value.dim() and value.dtype.is_floating_point


def _tensors(out: Any) -> dict[str, torch.Tensor]:
    if is_dataclass(out) and not isinstance(out, Mapping):
        out = {each.name: getattr(out, each.name, None) for each in fields(out)}
    if isinstance(out, Mapping):
        return {str(k): v for k, v in out.items() if isinstance(v, torch.Tensor)}
    leaves = out if isinstance(out, (tuple, list)) else [out]
    return {f"output_{i}": v for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)}


def _with_loss(out: Any, loss: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model's output, and the loss. Raises `CaptureError` if the loss is no floating scalar."""
    loss = _without_dimension(loss)
    if not is_loss(loss):
        what = f"a {loss.dtype} tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise CaptureError(
            f"loss_fn must return a floating scalar tensor, it returned {what}; reduce it to a sum or mean"
        )
    return {**_tensors(out), "loss": loss}
