"""Conversions of modules inside of forward: ``self.classifier.to(dtype)``, ``expert.to(x.device)``.

A conversion to the dtype and the device that a module has changes nothing. Libraries write it so that weights follow
their input. torch.export cannot follow it, because a trace has no tensors to put into the module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain

import torch
from torch import nn

from autopar._torch import exports
from autopar.capture.export.source_lines import line_that_runs
from autopar.errors import CaptureError


def converted_alike(model: nn.Module) -> AbstractContextManager[None]:
    """A context of a trace in which a conversion that changes nothing is left out, and any other one is refused."""

    def convert(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        is_own = module in set(model.modules())
        for tensor in chain(module.parameters(), module.buffers()):
            has = tensor.dtype, tensor.device
            with exports.without_tracing():
                as_is = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (as_is.dtype, as_is.device) != has:
                if not is_own:  # a module that forward makes
                    return _converted(module, function)
                raise CaptureError(
                    f"the model cannot be captured: {line_that_runs(model)}: forward converts {type(module).__name__} "
                    f"from {has[0]} on {has[1]} to {as_is.dtype} on {as_is.device}; convert the module before it is "
                    "given to autopar, or convert tensors at this line"
                )
        return module

    return exports.module_conversions(convert)


def _converted(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A module that forward made, with other tensors: a trace can put no values into the first ones."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            owner._parameters[name] = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = function(buffer)
    return module
