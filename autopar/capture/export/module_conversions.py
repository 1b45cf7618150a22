"""Conversions of modules inside of forward: ``self.classifier.to(dtype)``, ``expert.to(x.device)``.

A conversion to the dtype and the device that a module has changes nothing. Libraries write it so that weights follow
their input. torch.export cannot follow it, because a trace has no tensors to put into the module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import nn

from autopar._torch import exports
from autopar.capture.export.source_lines import line_that_runs
from autopar.errors import CaptureError


def converted_alike(model: nn.Module) -> AbstractContextManager[None]:
    """A context of a trace in which a conversion that changes nothing is left out, and any other one is refused."""

    def convert(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], plain: Callable[[], Any]) -> Any:
        own = {id(one) for one in model.modules()}
        if id(module) not in own:  # of a module that forward makes
            return plain()
        for tensor in chain(module.parameters(), module.buffers()):
            has = tensor.dtype, tensor.device
            with exports.without_tracing():
                found = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (found.dtype, found.device) != has:
                raise CaptureError(
                    f"the model cannot be captured: {line_that_runs(model)}: forward converts {type(module).__name__} "
                    f"from {has[0]} on {has[1]} to {found.dtype} on {found.device}; convert the module before it is "
                    "given to autopar, or convert tensors at this line"
                )
        return module

    return exports.module_conversions(convert)
