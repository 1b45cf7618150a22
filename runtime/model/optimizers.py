"""The real optimizers of an entry of `autopar.ir.optimizers.OPTIMIZERS`, for a model that trials train."""

import importlib

import torch

from autopar.ir.optimizers import DEFAULT_OPTIMIZER, OwnPart, optimizer_named
from autopar.ir.program import hidden_parameters
from autopar.runtime.model.module import ParallelModel


def optimizers_of(model: ParallelModel, name: str, lr: float) -> list[torch.optim.Optimizer]:
    """The optimizers that train a model as the entry of a name says."""
    entry, usual = optimizer_named(name), optimizer_named(DEFAULT_OPTIMIZER)
    hidden = hidden_parameters(model.program)
    names = {info.whole_name for key, info in model.program.every_parameter.items() if key in hidden}
    mine, others = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for key, parameter in model.named_parameters():
        part = OwnPart(
            shape=parameter.shape,
            num_elements=parameter.numel(),
            element_bytes=parameter.element_size(),
            is_hidden=key in names,
        )
        (mine if entry.takes(part) else others).append(parameter)
    optimizers = list[torch.optim.Optimizer]()
    for choice, parameters in ((entry, mine), (usual, others)):
        if parameters:
            module, kind = choice.kind.split(":")
            optimizers.append(getattr(importlib.import_module(module), kind)(parameters, lr=lr, **choice.options))
    return optimizers
