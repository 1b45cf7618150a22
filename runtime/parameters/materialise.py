"""Where initial weights come from: the model itself, a state, or the model's own seeded initialisation.

`parameter_source` gives one whole tensor at a time, so that memory never holds more than one. A meta model without a
state initialises itself. The wanted tensor gets real memory and everything else stays on meta. Then the initialisers
that may write it run, from its module up to the root, in the order of construction.

Operators on meta tensors draw no random numbers, and the generator is seeded by (seed, first name). So a tensor's
values depend neither on the plan, nor on the rank, nor on the order of requests. They may differ in the last bit
between kinds of CPU, as all of torch's random numbers do.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.errors import InputError, did_you_mean
from autopar.runtime.codegen.randomness import seed_from
from autopar.runtime.data.order import kept_draws, seed_draws
from autopar.runtime.parameters.state_loading import (
    ModelTensor,
    StateEntry,
    StateSource,
    compare_state,
    ignored_names,
    model_tensors,
    open_state,
)
from autopar.runtime.parameters.transformers_names import is_pretrained, name_to_keep, named_as_in_model

# what modules call their own initialiser; transformers' `init_weights` is another thing and is never called
_INITIALISERS = ("reset_parameters", "_reset_parameters", "init_weights")
_WHAT_TO_PASS = "pass a state dict or a .safetensors file, or build the model on CPU"

_Action = Callable[[], object]


def parameter_source(
    model: nn.Module, *, state: StateSource | None = None, seed: int = 0, dtype: torch.dtype | None = None
) -> Callable[[str], torch.Tensor]:
    """A function from a name to its whole value on CPU, from the `state`, the model or its initialisers."""
    slots = model_tensors(model)
    entries: Mapping[str, StateEntry] = {}
    if state is not None:
        entries = named_as_in_model(model, open_state(state))
        compare_state(slots, entries, ignored=ignored_names(model))
    first_names = {name: slot.name for slot in slots.values() for name in slot.names}
    initialiser = _Initialiser(model, seed)

    def source(name: str) -> torch.Tensor:
        if name not in first_names:
            raise InputError(
                f"the model has no parameter or buffer {name!r}; {did_you_mean(name, tuple(first_names), max_listed=5)}"
            )
        slot = slots[first_names[name]]
        held = slot.tensor
        if slot.persistent and entries:
            value = _from_state(slot, entries)
        elif not held.is_meta:
            value = held.detach()
        else:
            value = initialiser(slot)
        wanted = held.dtype
        if dtype is not None and held.is_floating_point():
            wanted = dtype if slot.is_parameter or torch.promote_types(wanted, dtype) == dtype else wanted
        return value.to(device="cpu", dtype=wanted)

    return source


def _from_state(slot: ModelTensor, entries: Mapping[str, StateEntry]) -> torch.Tensor:
    present = [name for name in slot.names if name in entries]
    value = entries[present[0]].load()
    for other in present[1:]:
        if not torch.equal(value, entries[other].load()):
            raise InputError(
                f"{present[0]} and {other} are one parameter in the model but hold different values in the state; "
                "keep one of them, or untie them in the model"
            )
    return value


class _Initialiser:
    """Runs a meta model's own initialisation for one tensor at a time."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._distinct = tuple(dict.fromkeys(self._modules.values()))

    def __call__(self, slot: ModelTensor) -> torch.Tensor:
        target = name_to_keep(self._modules[""], slot.names)  # transformers initialises first and ties after
        path, _, attribute = target.rpartition(".")
        chain = self._chain(path)
        in_transformers, everything = _actions(chain)
        # Where transformers' scheme alone writes every element, what module constructors wrote before is moot: one
        # pass over a large tensor instead of two.
        for actions in (in_transformers, everything):
            value = self._run(slot, chain[0], attribute, actions) if actions else None
            if value is not None:
                return value
        owner = chain[0]
        value = self._rebuilt(slot, owner, attribute)
        if value is not None:
            return value
        kind, dtype = type(owner).__name__, str(slot.tensor.dtype).removeprefix("torch.")
        where = f"{kind} at {path!r}" if path else kind
        raise InputError(
            f"nothing initialises {target}, {dtype} {tuple(slot.tensor.shape)} of {where}. No _init_weights and no "
            "reset_parameters, here or in a parent module, writes all of it. The module cannot be built again "
            "from its "
            f"attributes either. Remedy: {_WHAT_TO_PASS}, or define reset_parameters() in {kind}"
        )

    def _chain(self, path: str) -> list[nn.Module]:
        """The module at a path, then those around it, the root last."""
        parts = path.split(".") if path else []
        return [self._modules[".".join(parts[:n])] for n in range(len(parts), -1, -1)]

    def _run(self, slot: ModelTensor, owner: nn.Module, attribute: str, actions: list[_Action]) -> torch.Tensor | None:
        """The tensor after the actions, None if they did not write all of it."""
        held = slot.tensor
        # NaN shows what is not written; it also survives scaling of what was there before
        blank = float("nan") if held.is_floating_point() or held.is_complex() else 0
        real = torch.full(held.shape, blank, dtype=held.dtype, device="cpu")
        if slot.is_parameter:
            real = nn.Parameter(real, requires_grad=held.requires_grad)
            vars(real).update({k: v for k, v in vars(held).items() if k != "_is_hf_initialized"})
        version = real._version
        with self._restored(), seeded(seed_from(f"{self._seed}:{slot.name}")), _initialising():
            tensors: dict[str, Any] = owner._parameters if slot.is_parameter else owner._buffers
            tensors[attribute] = real
            try:
                for action in actions:
                    action()
            except Exception as error:
                raise InputError(
                    f"initialising {slot.name} of a meta model failed in {type(owner).__name__} or a parent module: "
                    f"{type(error).__name__}: {error}; {_WHAT_TO_PASS}"
                ) from error
            value: torch.Tensor | None = tensors.get(attribute)
        if value is None or value.is_meta or value.shape != held.shape:
            return None
        value = value.detach()
        if blank == 0:
            written = value.data_ptr() != real.data_ptr() or real._version != version
        else:
            written = not _has_nan(value)
        return value.to(held.dtype) if written or not value.numel() else None

    def _rebuilt(self, slot: ModelTensor, owner: nn.Module, attribute: str) -> torch.Tensor | None:
        """What the owner's constructor computes, anew on CPU; None where its arguments cannot be told for certain."""
        arguments = _constructor_arguments(owner)
        if arguments is None:
            return None
        with seeded(seed_from(f"{self._seed}:{slot.name}")), torch.no_grad(), torch.device("cpu"), _EmptyOnMeta():
            try:
                twin = type(owner)(**arguments)
            except Exception:  # whatever a constructor raises, the buffer is not to be had this way
                return None
        value = (twin._parameters if slot.is_parameter else twin._buffers).get(attribute)
        if value is None or value.is_meta or value.shape != slot.tensor.shape or _settings(twin) != _settings(owner):
            return None
        return value.detach().to(slot.tensor.dtype)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Put back every module's parameters and buffers, whatever an initialiser replaced."""
        before = [(m, dict(m._parameters), dict(m._buffers)) for m in self._distinct]
        try:
            yield
        finally:
            for module, parameters, buffers in before:
                for held, kept in ((module._parameters, parameters), (module._buffers, buffers)):
                    if any(held.get(k) is not v for k, v in kept.items()) or len(held) != len(kept):
                        held.clear()
                        held.update(kept)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All of a process's CPU generators, seeded. Their states are put back."""
    with kept_draws():
        seed_draws(seed)  # torch.manual_seed would seed the devices' generators too
        yield


def _has_nan(value: torch.Tensor) -> bool:
    if not value.numel():
        return False
    # the minimum is NaN if any element is, and needs no mask of the tensor's size
    flat = torch.view_as_real(value) if value.is_complex() else value
    return bool(flat.min().isnan())


def _actions(chain: list[nn.Module]) -> tuple[list[_Action], list[_Action]]:
    """Initialisers that may write a tensor of ``chain[0]``: transformers' alone, and all, in construction's order."""
    ours: list[_Action] = []
    everything: list[_Action] = []
    for i, module in enumerate(chain):
        for name in () if is_pretrained(module) else _INITIALISERS:
            method = getattr(module, name, None)
            if callable(method) and _num_required(method) == 0:
                everything.append(method)
        around: Any = next(filter(is_pretrained, chain[i:]), None)
        if around is not None:
            # each module is initialised by the innermost model that holds it, children before parents
            action = partial(around._init_weights, module)
            ours.append(action)
            everything.append(action)
            continue
        method = getattr(module, "_init_weights", None)
        if callable(method) and _num_required(method) == 1:  # the `self.apply(self._init_weights)` of many models
            everything += [partial(method, inner) for inner in chain[: i + 1]]
    return (ours if len(ours) < len(everything) else []), everything


def _num_required(method: Callable[..., object]) -> int | None:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return None
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return sum(p.default is p.empty for p in plain)


@contextmanager
def _initialising() -> Iterator[None]:
    """No autograd, on CPU, with torch's initialisers, which transformers replaces by no-ops in some contexts."""
    library = sys.modules.get("transformers.initialization")
    guard = library.guard_torch_init_functions() if library is not None else contextlib.nullcontext()
    with torch.no_grad(), torch.device("cpu"), guard:
        yield


class _EmptyOnMeta(TorchFunctionMode):
    """Uninitialised tensors lie on meta: what a constructor computes is real, what it only allocates costs nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _constructor_arguments(module: nn.Module) -> dict[str, Any] | None:
    """What a module was built with, as far as it keeps it in attributes of the same names; None if any is not kept."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in vars(module) and parameter.kind is not parameter.POSITIONAL_ONLY:
            arguments[name] = vars(module)[name]
        elif not (name in ("device", "dtype") and parameter.default is not parameter.empty):
            return None
    return arguments


def _settings(module: nn.Module) -> dict[str, Any]:
    """Plain public attributes: equal for a module and its twin only if the arguments were guessed right."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, plain) and name != "training" and not name.startswith("_")
    }
