"""The unmodified module after `parallelize`. No change of it reaches the captured programs, so the next step raises.

Numbers, texts and flags that a capture read are constants of the program (`Program.reads`). Other attributes, such as
the counters of a training loop, may change. The user's modules are held weakly.

An optimizer of the module's own parameters trains nothing. Its step raises if the `ParallelModel` has gradients and
these parameters have none: a loop that trains both models, or updates parameters by hand, goes on.
"""

import gc
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import finalize, ref

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from autopar._torch import private
from autopar.capture.export.own_changes import PLAIN, attribute_of, settings_of
from autopar.errors import InputError, RuntimeInputError, short_repr
from autopar.runtime.parameters.shown_tensor import parts_of

_Model = TypeVar("_Model", bound=nn.Module)
_OTHER = object()  # in place of a value that is no constant of a program
_AGAIN = "call autopar.parallelize again after the change"
_SINCE = "when the model was captured and is"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A module, or an object of settings, and what it held. `tensors` has submodules too, and says what trains."""

    path: str
    held: Any  # a weak reference
    training: bool
    tensors: Mapping[str, tuple[Any, bool | None]]
    values: Mapping[str, object]  # of plain attributes

    def __str__(self) -> str:
        return f"{self.path or 'the model'} ({type(self.held()).__name__})"


class OriginalModel:
    """What `parallelize` found in a module and in its settings. A loss function that is a module is watched too."""

    def __init__(self, model: nn.Module, weightless: nn.Module, loss_fn: object, reads: Iterable[str]) -> None:
        self.weightless = weightless
        self._parts = [_part(path, owner) for path, owner in _owners(model, loss_fn)]
        arguments = inspect.signature(model.forward).parameters.items()
        self.optional = frozenset(name for name, arg in arguments if arg.default is None)  # inputs that may be missing
        self._watched: dict[int, dict[str, object]] = {}  # names and constants by part
        self._names = {id(p): (name, ref(p)) for name, p in model.named_parameters()}
        kinds = _with_subclasses(LRScheduler) | _with_subclasses(AveragedModel)
        holders = [o for o in gc.get_referrers(*kinds) if type(o) in kinds]  # each object refers to its class
        ours = (o for o in holders if isinstance(o, LRScheduler) or type(o.module) is type(model))
        self._followers = [(ref(o), _position(o)) for o in ours]
        self.watch(reads)

    def watch(self, reads: Iterable[str]) -> None:
        """Compare these attributes too, which another capture read."""
        for index, part in enumerate(self._parts):
            owner, kind = part.held(), attribute_of(part.held(), "")
            for name in (read.removeprefix(kind) for read in reads if read.startswith(kind)):
                before = part.values.get(name, _constant(getattr(type(owner), name, None)))
                self._watched.setdefault(index, {}).setdefault(name, before)

    @property
    def settings(self) -> dict[str, str]:
        """The numbers, texts and flags that captures read, by the attribute's name. Names of devices are left out."""
        return {
            f"{self._parts[index].path}.{name}".lstrip("."): repr(value)
            for index, constants in self._watched.items()
            for name, value in constants.items()
            if isinstance(value, PLAIN) and not (isinstance(value, str) and _is_device(value))
        }

    def attached(self, parallel: _Model, optimizer: torch.optim.Optimizer | None) -> _Model:
        """The model that is trained instead, in the module's mode. It takes over the parameters of `optimizer`."""
        if optimizer is not None:
            self._move(optimizer, dict(parallel.named_parameters()))
        trained = ref(parallel)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            params, model = self._of(optimizer), trained()
            idle = bool(params) and not any(p.grad is not None and bool(p.grad.any()) for p in params)
            if idle and model is not None and any(p.grad is not None for p in model.parameters()):
                raise RuntimeInputError(_nobody(optimizer))

        finalize(parallel, register_optimizer_step_pre_hook(before_step).remove)
        return parallel.train(self._parts[0].training)

    def _move(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put parameters of the trained model in the place of the module's. Groups keep their options."""
        kind, params = type(optimizer).__name__, self._of(optimizer)
        if optimizer.state or len(params) < sum(len(group["params"]) for group in optimizer.param_groups):
            why = "has a state already" if optimizer.state else "holds a parameter that the model does not have"
            raise InputError(f"{kind} {why}, so it cannot move; make it of parallel.parameters() after parallelize")
        for group in optimizer.param_groups:
            names = [self._names[id(p)][0] for p in group["params"]]
            kept = [k for k, name in enumerate(names) if name in parameters]  # others are of other stages
            if "param_names" in group:
                group["param_names"][:] = [group["param_names"][k] for k in kept]
            group["params"][:] = [parameters[names[k]] for k in kept]

    def _of(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """The parameters of the module that an optimizer holds."""
        every = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in every if id(p) in self._names and self._names[id(p)][1]() is p]

    def change(self, parallel: Any, *, trains: bool) -> str:
        """The first change since then, with its remedy. Empty without one."""
        return next(self._changes(parallel, trains), "")

    def _changes(self, parallel: Any, trains: bool) -> Iterator[str]:
        for name in (*(parallel._modules.keys() - {"stages"}), *parallel._parameters):
            yield f"{name!r} was set on the ParallelModel, which runs captured code; set it on your model and {_AGAIN}"
        for index, constants in self._watched.items():
            part = self._parts[index]
            for holder in (part.held(), None if part.path else parallel):
                values = {} if holder is None else vars(holder)
                for name, before in constants.items():
                    now = values.get(name, before)
                    if now is not before and _constant(now) not in (before, _OTHER):
                        where = "the ParallelModel" if holder is parallel else part
                        yield _text(f"{where}: attribute {name!r}", f"{part.path}.{name}".lstrip("."), before, now)
        root = self._parts[0].held()
        for part in self._parts:
            module = part.held()
            if isinstance(module, nn.Module):
                yield from _new_tensors(part, module)
                if root is not None and root.training and part.training and not module.training:
                    yield f"{part} was in training mode {_SINCE} in eval mode now; {_AGAIN}"
        trained = {info.whole_name: info.requires_grad for info in parallel.program.every_parameter.values()}
        with private.without_torch_function():  # which would take 2 µs for each parameter
            held = parallel.named_parameters() if trains else ()
            changed = [name for name, p in held if any(x.requires_grad != trained[name] for x in parts_of(p))]
        for name in changed:
            yield _text(f"the ParallelModel: requires_grad of {name!r}", "", trained[name])
        for held, before in self._followers:
            one = held()
            follows = one is not None and _position(one) != before
            if follows and (not isinstance(one, LRScheduler) or self._of(one.optimizer)):
                yield _nobody(one)


def _new_tensors(part: _Part, module: nn.Module) -> Iterator[str]:
    tensors: dict[str, Any] = {**module._modules, **module._parameters}
    for name in tensors.keys() | part.tensors.keys():
        tensor, (held, trains) = tensors.get(name), part.tensors.get(name, (lambda: None, None))
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:  # the user frees its memory
            continue
        if tensor is not held():
            loads = "load values with parallel.load_state_dict, or " if isinstance(tensor, torch.Tensor) else ""
            yield f"{part}: {name!r} is another one than autopar.parallelize captured; {loads}{_AGAIN}"
        elif isinstance(tensor, torch.Tensor) and tensor.requires_grad != trains:
            yield _text(f"{part}: requires_grad of {name!r}", "", trains)


def _text(what: str, path: str, before: object, now: object = None) -> str:
    if not path:
        return f"{what} was {before} {_SINCE} {not before} now; set it on your model and {_AGAIN}"
    number = isinstance(now, (int, float)) and not isinstance(now, bool)
    buffer = f"make it a buffer and write to parallel.buffer({path!r}), give it to forward as an input, or "
    return (
        f"{what} was {short_repr(before)} {_SINCE} {short_repr(now)} now, and the captured program keeps the first "
        f"value; {buffer * number}{_AGAIN}"
    )


def _nobody(follower: object) -> str:
    return (
        f"{type(follower).__name__} follows parameters from before autopar.parallelize, which get no gradient, and "
        "nobody steps the parameters of the ParallelModel. Make it of parallel.parameters(), or give an optimizer "
        "without state to autopar.parallelize(..., optimizer=optimizer)"
    )


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _position(follower: Any) -> int:
    return int(follower.last_epoch if isinstance(follower, LRScheduler) else follower.n_averaged)


def _owners(model: nn.Module, loss_fn: object) -> Iterator[tuple[str, Any]]:
    """The modules of a model and of its loss function, and their settings, each once, by path."""
    owners: dict[int, tuple[str, Any]] = {}
    inside = loss_fn.named_modules(prefix="loss_fn") if isinstance(loss_fn, nn.Module) else ()
    for path, module in (*model.named_modules(), *inside):
        owners.setdefault(id(module), (path, module))
        for name, settings in settings_of(module):
            owners.setdefault(id(settings), (f"{path}.{name}".lstrip("."), settings))
    return iter(owners.values())


def _part(path: str, owner: Any) -> _Part:
    is_module = isinstance(owner, nn.Module)
    tensors: dict[str, Any] = {**owner._modules, **owner._parameters} if is_module else {}
    return _Part(
        path=path,
        held=_reference(owner),
        training=is_module and owner.training,
        tensors={n: (_reference(t), getattr(t, "requires_grad", None)) for n, t in tensors.items()},
        values={name: constant for name, v in vars(owner).items() if (constant := _constant(v)) is not _OTHER},
    )


def _reference(value: Any) -> Any:
    try:
        return ref(value)
    except TypeError:  # None, or an object without weak references
        return lambda: value


def _is_device(text: str) -> bool:
    with suppress(RuntimeError):
        return bool(torch.device(text))
    return False


def _constant(value: object, depth: int = 3) -> object:
    """A value that a program may hold, as an immutable one. `_OTHER` for tensors and other objects."""
    if isinstance(value, PLAIN):
        return value
    if not depth or not isinstance(value, (list, tuple, dict)):
        return _OTHER
    if isinstance(value, dict):
        return tuple((key, _constant(v, depth - 1)) for key, v in value.items())
    return tuple(_constant(v, depth - 1) for v in value)
