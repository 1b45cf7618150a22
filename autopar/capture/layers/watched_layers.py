"""Equal layers of a deep model, found without an export: a copy runs on meta, and its calls are watched.

A run records no graph, so it takes a small part of the time of an export. Each call of a torch function is written as
text: the function, its arguments and the shapes of its results. A tensor that a call made has the name of this call,
relative to the current layer. Any other tensor has its name in the model, relative to the current layer. Two layers are
equal if their texts are equal, and their modules have one class and equal attributes except for the layer's number.

From some layer on, the layers of a stack must repeat with a period. Two periods are kept, and the model runs again
without the other layers. These calls, with the last period repeated, must equal the calls of the whole model.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from autopar._torch.private import pytree
from autopar.capture.export.export import run_on_meta
from autopar.capture.layers.repeated_layers import Layer, Stack
from autopar.capture.request import Request
from autopar.capture.weightless import plain_tensors, with_tensors

Calls = Mapping[Layer | None, Sequence[str]]  # the calls in each layer; None has the calls in no layer
_FEWEST = 7  # layers of which less than half are kept: the first one, and two periods
_PLAIN = (type(None), type(...), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device, torch.layout)


class _Unknown(Exception):
    """The calls of two runs cannot be compared: an argument has no text form, or layers are called out of order."""


def watched_stacks(request: Request) -> tuple[Stack, ...]:
    """The stacks for which an export needs less than half of the layers. The model runs on meta, or its copy does."""
    lengths = _stacks(request.model)
    if not any(length >= _FEWEST for length in lengths.values()):
        return ()

    def calls() -> Calls:
        now = {path: len(model.get_submodule(path)._modules) for path in lengths}
        watch = _Watch(model, on_meta.named_inputs, now)
        with torch.random.fork_rng(devices=()), watch.layers(), watch:
            run_on_meta(on_meta)
        return watch.calls

    try:
        tensors = (*request.model.parameters(), *request.model.buffers(), *plain_tensors(request.model))
        model = request.model if all(t.is_meta for t in tensors) else with_tensors(request.model, _on_meta)
        on_meta = replace(request, model=model, inputs=pytree.tree_map_only(torch.Tensor, _on_meta, request.inputs))
        whole = calls()
        every = (_stack(path, length, whole, request.model.get_submodule(path)) for path, length in lengths.items())
        stacks = tuple(stack for stack in every if stack is not None)
        with without_layers(model, stacks):
            fewer = calls() if stacks else {}
    except Exception:  # a model may raise anything if it runs on meta outside of an export
        return ()
    return stacks if whole == _repeated(fewer, stacks) else ()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


@contextmanager
def without_layers(model: nn.Module, stacks: Sequence[Stack]) -> Iterator[None]:
    """The model without the last layers of its stacks. The context restores them at its end."""
    whole = {stack.path: dict(model.get_submodule(stack.path)._modules) for stack in stacks}
    try:
        for stack in stacks:
            modules = model.get_submodule(stack.path)._modules
            for n in range(stack.kept, len(stack.like)):
                del modules[str(n)]
        yield
    finally:
        for path, modules in whole.items():
            model.get_submodule(path)._modules.update(modules)


def _stacks(model: nn.Module) -> dict[str, int]:
    """The number of layers of each stack that is in no other stack."""
    lengths: dict[str, int] = {}
    for path, module in model.named_modules():
        names = list(module._modules)
        numbered = bool(names) and names == [str(n) for n in range(len(names))]
        inside = any(name.isdigit() for name in path.split("."))
        if numbered and path and not inside:
            lengths[path] = len(names)
    return lengths


def _stack(path: str, length: int, calls: Calls, module: nn.Module) -> Stack | None:
    """A stack with the fewest first layers whose last period repeats up to the last layer. None if none repeats."""
    if any((path, n) not in calls for n in range(length)):
        return None
    children, kinds = module._modules, list[int]()
    for n in range(length):
        firsts = (m for m in dict.fromkeys(kinds) if calls[path, m] == calls[path, n])
        kinds.append(next((m for m in firsts if _same_settings(children[str(m)], children[str(n)], (m, n))), n))
    choices = []
    for period in range(1, length // 4 + 1):
        differ = (n for n in range(1, length - period) if kinds[n] != kinds[n + period])  # layer 0 has no predecessor
        kept = max(differ, default=0) + 1 + 2 * period
        kept += (length - kept) % period
        if 2 * kept < length:
            choices.append((kept, period))
    if not choices:
        return None
    kept, period = min(choices)
    like = (*range(kept), *(kept - period + (n - kept) % period for n in range(kept, length)))
    return Stack(path=path, like=like, kept=kept, period=period)


def _same_settings(a: Any, b: Any, numbers: tuple[int, int]) -> bool:
    """Whether attributes of layers with these numbers are equal. An integer may be the layer's number, or one more."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is int:
        return a == b or (a - numbers[0] == b - numbers[1] and a - numbers[0] in (0, 1))
    if isinstance(a, torch.Tensor):
        return (a.shape, a.dtype, a.requires_grad, a.device) == (b.shape, b.dtype, b.requires_grad, b.device)
    if isinstance(a, nn.Module):
        return _same_settings(vars(a), vars(b), numbers)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_same_settings(a[key], b[key], numbers) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same_settings(x, y, numbers) for x, y in zip(a, b, strict=True))
    if isinstance(a, partial):
        return _same_settings((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), numbers)
    return isinstance(a, (str, float, complex, bytes, set, frozenset, torch.dtype, torch.device)) and a == b


def _repeated(fewer: Calls, stacks: Sequence[Stack]) -> Calls:
    """The calls of the whole model, if each removed layer makes the same calls as its like layer."""
    calls = dict(fewer)
    for stack in stacks:
        for n in range(stack.kept, len(stack.like)):
            calls[stack.path, n] = fewer[stack.path, stack.like[n]]
    return calls


class _Watch(TorchFunctionMode):
    """Writes the calls of one run as text. It keeps the tensors alive, because their `id` identifies them."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, torch.Tensor], stacks: Mapping[str, int]) -> None:
        super().__init__()
        self.model, self.stacks = model, stacks
        self.calls: dict[Layer | None, list[str]] = defaultdict(list)
        self.layer: Layer | None = None
        self.alive: list[torch.Tensor] = []
        self.made: dict[int, tuple[Layer | None, str]] = {}
        self.named = {id(tensor): f"input {name}" for name, tensor in inputs.items()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.named[id(tensor)] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = f"{func!r}({self.text(args)};{self.text(kwargs)})"
        out = func(*args, **(kwargs or {}))
        reads_attribute = getattr(func, "__name__", "") == "__get__"  # later calls show the use of a shape
        if isinstance(out, torch.Tensor) or not reads_attribute:
            log = self.calls[self.layer]
            log.append(f"{given}->{self.result(out, str(len(log)))}")
        return out

    @contextmanager
    def layers(self) -> Iterator[None]:
        """A context whose hooks report the current layer. Each layer must be called once, in order."""
        every = ((path, n) for path, length in self.stacks.items() for n in range(length))
        layers = {self.model.get_submodule(f"{path}.{n}"): (path, n) for path, n in every}

        def enter(module: nn.Module, _: Any) -> None:
            if module in layers:
                path, n = layer = layers[module]
                if self.layer is not None or layer in self.calls or (n and (path, n - 1) not in self.calls):
                    raise _Unknown(layer)
                self.layer, self.calls[layer] = layer, []

        def leave(module: nn.Module, *_: Any) -> None:
            self.layer = None if module in layers else self.layer

        with register_module_forward_pre_hook(enter), register_module_forward_hook(leave):
            yield

    def result(self, value: Any, place: str) -> str:
        """The result of a call as text. From now on, its tensors have the name of this call."""
        if isinstance(value, torch.Tensor):
            self.alive.append(value)
            self.made[id(value)] = (self.layer, place)
            return f"{tuple(value.shape)}{value.dtype}{value.requires_grad}"
        if isinstance(value, (list, tuple)):
            return ",".join(self.result(each, f"{place}.{k}") for k, each in enumerate(value))
        return repr(value) if isinstance(value, _PLAIN) else type(value).__name__

    def text(self, value: Any) -> str:
        """An argument as text. A tensor appears as its source."""
        if isinstance(value, torch.Tensor):
            return self.source(value)
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}({','.join(map(self.text, value))})"
        if isinstance(value, dict):
            return f"{list(value)}({','.join(map(self.text, value.values()))})"
        if isinstance(value, slice):
            return f"slice({self.text((value.start, value.stop, value.step))})"
        if isinstance(value, (torch.memory_format, type)):
            return repr(value)
        raise _Unknown(type(value))

    def source(self, tensor: torch.Tensor) -> str:
        """The call that made a tensor, or the tensor's name, relative to the current layer."""
        if id(tensor) not in self.made:
            name = self.named[id(tensor)]
            here = "" if self.layer is None else f"{self.layer[0]}.{self.layer[1]}."
            return f"@own {name.removeprefix(here)}" if here and name.startswith(here) else f"@{name}"
        layer, place = self.made[id(tensor)]
        if layer is None:
            return f"%{place}"
        path, n = layer
        if self.layer is not None and self.layer[0] == path and self.layer[1] - n in (0, 1):
            return f"%{self.layer[1] - n} before {place}"
        return f"%{path}.{'last' if n == self.stacks[path] - 1 else n} {place}"
