"""Models that change themselves in their forward pass: another mode, another submodule, a counter.

A capture calls a model more than once, and `torch.export` restores only some attributes. A call of a model leaves
numbers, flags, submodules and tensors behind. They lie in attributes, lists and dictionaries, in objects that the model
holds, and in functions with a cache. In a trace the tensors have no values. `as_it_was` takes all of them out again.

Changes of buffers are part of the model. A buffer may change in place, or the model may assign another tensor to its
name.

Libraries convert modules inside of forward, so that weights follow their input: ``self.classifier.to(dtype)``. A trace
cannot follow this, because it has no tensors to put into the module.
"""

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from functools import lru_cache
from itertools import chain
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autopar._torch import exports
from autopar.capture.export.source_lines import line_that_runs
from autopar.errors import CaptureError

PLAIN = (bool, int, float, str, bytes, type(None))
_OF_EVERY_MODULE = frozenset([*vars(nn.Module()), "use_cache"])  # a capture decides `use_cache`
_OPAQUE = (*PLAIN, torch.Tensor, torch.dtype, type, ModuleType)
_PLAIN_TYPES = frozenset([*PLAIN, torch.Tensor, nn.Parameter])
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)


@lru_cache
def _nothing() -> None:
    """A function with a cache, for its type."""


_CACHED: Any = type(_nothing)


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """A context that ends with the attributes, lists, dictionaries and objects of the model that it began with."""
    before, calls = list(_held(model)), {cached: cached.cache_info().misses for cached in _caches(model)}
    try:
        yield
    finally:
        for content, entries in before:
            if (content or entries) and list(map(id, _parts(content))) != list(map(id, _parts(entries))):
                content.clear()
                content.extend(entries) if isinstance(content, (list, deque)) else content.update(entries)
        for cached, misses in calls.items():
            if cached.cache_info().misses != misses:
                cached.cache_clear()


def _parts(content: Any) -> list[Any]:
    return [*content, *content.values()] if isinstance(content, dict) else [*content]


def _held(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """The containers that a model reaches, attributes of objects included, each with a copy."""
    waiting: list[Any] = [model]
    seen: dict[int, Any] = {}  # holds each object, whose id would be another's after its end
    while waiting:
        value = waiting.pop()
        if isinstance(value, _OPAQUE) or id(value) in seen:
            continue
        seen[id(value)] = value
        if type(value) in _CONTAINERS:
            yield value, value.copy()
        if type(value) in (*_CONTAINERS, tuple):
            waiting += (part for part in _parts(value) if type(part) not in _PLAIN_TYPES)
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
            waiting.append(vars(value))


def _caches(model: nn.Module) -> set[Any]:
    """The functions with a cache in the classes of the modules, and in the Python modules that define them."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if cls is not object}
    files = {vars(cls).get("__module__") for cls in classes} - {None, nn.Module.__module__}
    spaces = [*map(vars, classes), *(vars(sys.modules[name]) for name in files if name in sys.modules)]
    return {value for space in spaces for value in list(space.values()) if isinstance(value, _CACHED)}


def settings_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The objects of numbers, texts and flags that a module keeps, such as its configuration, by attribute."""
    for name, value in vars(module).items():
        is_other = callable(value) or isinstance(value, (nn.Module, torch.Tensor, ModuleType, Enum))
        if not is_other and any(isinstance(v, PLAIN) for v in getattr(value, "__dict__", {}).values()):
            yield name, value


def attribute_of(owner: object, name: str) -> str:
    """The name of an attribute in `Program.reads`: the class of its owner, and its own."""
    return f"{type(owner).__module__}.{type(owner).__qualname__}.{name}"


@contextmanager
def attributes_read(model: nn.Module, names: set[str]) -> Iterator[None]:
    """A context in which `names` gets the plain attributes of modules and settings that code reads, but not writes."""
    written: set[str] = set()

    def kept(name: str, value: Any) -> bool:
        return isinstance(value, (*PLAIN, list, tuple, dict)) and name not in _OF_EVERY_MODULE and name[:2] != "__"

    def reading(get: Any) -> Any:
        def read(self: Any, name: str) -> Any:
            value = get(self, name)
            if kept(name, value):
                names.add(attribute_of(self, name))
            return value

        return read

    def write(self: Any, name: str, value: Any, plain: Any = nn.Module.__setattr__) -> None:
        written.add(attribute_of(self, name))
        plain(self, name, value)

    with ExitStack() as stack:
        for kind in {nn.Module, *(type(v) for module in model.modules() for _, v in settings_of(module))}:
            stack.enter_context(patch.object(kind, "__getattribute__", reading(kind.__getattribute__)))
        stack.enter_context(patch.object(nn.Module, "__setattr__", write))
        yield
    names -= written


@contextmanager
def assigned_in_place(model: nn.Module, notes: list[str]) -> Iterator[None]:
    """A context that ends with the first tensor of every buffer, which then holds the values of the assigned tensor."""
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


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """The model with `config.use_cache` off."""
    owned: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in owned if getattr(config, "use_cache", None)}
    with ExitStack() as stack:
        for config in configs.values():
            stack.enter_context(patch.object(config, "use_cache", False))
        yield


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
