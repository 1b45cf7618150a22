"""Models that change themselves in their forward pass: another mode, another submodule, a counter.

A capture calls a model more than once, and `torch.export` restores only some attributes. So every call ends with the
submodules and the plain attributes that it began with. Changes of buffers are part of the model. A buffer may change in
place, or the model may assign another tensor to its name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, bytes, type(None))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """A context that restores the submodules and the numbers, texts and flags of every module at its end."""
    before = [(module, dict(module._modules), _plain(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, submodules, plain in before:
            if submodules != module._modules:
                module._modules.clear()
                module._modules.update(submodules)
            for name, value in plain.items():
                if name not in module.__dict__ or isinstance(module.__dict__[name], _PLAIN):
                    module.__dict__[name] = value


@contextmanager
def assigned_in_place(model: nn.Module, notes: list[str]) -> Iterator[None]:
    """A context that ends with the first tensor of every buffer, which then holds the values of the assigned tensor.

    `torch.export` records changes in place alone. A tensor of another shape cannot be kept, so `notes` gets its name.
    """
    before = [(path, m, name, first) for path, m in model.named_modules() for name, first in m._buffers.items()]
    yield
    for path, module, name, first in before:
        assigned = module._buffers.get(name)
        if first is None or assigned is None or assigned is first:
            continue
        if assigned.shape == first.shape:
            with torch.no_grad():
                first.copy_(assigned.detach())
        else:
            notes.append(
                f"the buffer {f'{path}.{name}'.lstrip('.')!r} gets another shape in the forward pass, so every step "
                f"begins with its first value; keep the shape {tuple(first.shape)} if later steps read the new one"
            )
        module._buffers[name] = first


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if isinstance(value, _PLAIN)}
