"""Models that change themselves in their forward pass: another mode, another submodule, a counter.

A capture calls a model more than once, and `torch.export` restores only some attributes. So every call ends with the
submodules and the plain attributes that it began with. Buffers are not touched: their changes are part of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if isinstance(value, _PLAIN)}
