"""Weights from outside: a state dict or safetensors files, compared with the model before anything is loaded.

Files are read through ``safetensors.safe_open``, one tensor at a time; nothing is ever unpickled.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from autopar.errors import InputError, Problem

StateSource = Mapping[str, torch.Tensor] | str | Path
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """A tensor that can be loaded: its shape, whether it holds real or complex numbers, and how to get it."""

    shape: tuple[int, ...]
    is_floating: bool
    load: Callable[[], torch.Tensor]
    unusable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A parameter or buffer of a model: its first name, all its names, where it lies and whether a state holds it."""

    name: str
    names: tuple[str, ...]
    owners: tuple[tuple[nn.Module, str], ...]
    is_parameter: bool
    persistent: bool

    @property
    def tensor(self) -> torch.Tensor:
        owner, attribute = self.owners[0]
        held = (owner._parameters if self.is_parameter else owner._buffers)[attribute]
        assert held is not None
        return held


def model_tensors(model: nn.Module) -> dict[str, ModelTensor]:
    """Every parameter and buffer by its first name, tied ones once, in the order of ``named_parameters``."""
    groups: dict[int, tuple[list[str], list[tuple[nn.Module, str]], bool, list[bool]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        parameters, buffers = module._parameters.items(), module._buffers.items()
        every = [*((True, *pair) for pair in parameters), *((False, *pair) for pair in buffers)]
        for is_parameter, attribute, tensor in every:
            if tensor is None:
                continue
            names, owners, _, persistent = groups.setdefault(id(tensor), ([], [], is_parameter, []))
            names.append(f"{prefix}.{attribute}" if prefix else attribute)
            owners.append((module, attribute))
            persistent.append(is_parameter or attribute not in module._non_persistent_buffers_set)
    slots = (
        ModelTensor(
            name=names[0],
            names=tuple(names),
            owners=tuple(owners),
            is_parameter=is_parameter,
            persistent=any(persistent),
        )
        for names, owners, is_parameter, persistent in groups.values()
    )
    return {slot.name: slot for slot in slots}


def open_state(state: StateSource) -> dict[str, StateEntry]:
    """What a mapping, a file or a folder of safetensors (its index, `model`, or all files) holds; no tensor is read."""
    if isinstance(state, Mapping):
        return {str(name): _entry_of(value) for name, value in state.items()}
    path = Path(state)
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise InputError(f"no such file or folder of weights: {path}")
    if path.name.endswith(_INDEX):
        return _open_index(path)
    if path.suffix != ".safetensors":
        raise InputError(
            f"{path} is not a .safetensors file; pickled weights are never read (convert them with safetensors.torch"
            ".save_file, or pass the state dict itself)"
        )
    return _open_file(path)


def _entry_of(value: Any) -> StateEntry:
    if not isinstance(value, torch.Tensor):
        reason = f"must be a tensor, not a {type(value).__name__}"
        return StateEntry(shape=(), is_floating=True, load=torch.Tensor, unusable=reason)
    unusable = None
    if hasattr(value, "full_tensor"):
        unusable = "must be a whole tensor, not a DTensor; call full_tensor() on it"
    elif value.is_meta:
        unusable = "must hold data, but lies on meta"
    return StateEntry(
        shape=tuple(value.shape),
        is_floating=value.is_floating_point() or value.is_complex(),
        load=value.detach,
        unusable=unusable,
    )


def _open_folder(folder: Path) -> dict[str, StateEntry]:
    indices = sorted(folder.glob("*" + _INDEX))
    preferred = folder / ("model" + _INDEX)
    if preferred in indices or len(indices) == 1:
        return _open_index(preferred if preferred in indices else indices[0])
    if indices:
        raise InputError(f"{folder} holds several indices; name one of them: {', '.join(p.name for p in indices)}")
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder} holds no .safetensors file")
    entries: dict[str, StateEntry] = {}
    for file in files:
        for name, entry in _open_file(file).items():
            if name in entries:
                raise InputError(
                    f"{name} is in several files of {folder} and no index says which counts; name one file"
                )
            entries[name] = entry
    return entries


def _open_index(path: Path) -> dict[str, StateEntry]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise InputError(f"{path} has no weight_map from names to files")
    opened: dict[str, dict[str, StateEntry]] = {}
    problems = []
    for file in dict.fromkeys(files.values()):
        # a downloaded index must not name files elsewhere: only plain names, on either kind of system
        if not re.fullmatch(r"[^/\\:\x00]+\.safetensors", file):
            problems.append(Problem(path=path.name, rule="files must be plain names of .safetensors files", value=file))
        elif not (path.parent / file).is_file():
            problems.append(Problem(path=path.name, rule="names a file that is not in the folder", value=file))
        else:
            opened[file] = _open_file(path.parent / file)
    for name, file in files.items():
        if file in opened and name not in opened[file]:
            problems.append(Problem(path=name, rule=f"is not in {file}, where {path.name} says it is"))
    if problems:
        raise InputError(f"{path} cannot be used", problems)
    return {name: opened[file][name] for name, file in files.items()}


def _open_file(path: Path) -> dict[str, StateEntry]:
    entries = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                kind = str(part.get_dtype())
                entries[name] = StateEntry(
                    shape=tuple(part.get_shape()),
                    is_floating=kind.startswith(("F", "BF", "C")),
                    load=partial(_load, path, name),
                )
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read as safetensors: {error}") from None
    return entries


def _load(path: Path, name: str) -> torch.Tensor:
    # opened anew each time: an open file keeps every page that was read mapped
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{name} cannot be read from {path}: {error}") from None
    return tensor


def ignored_names(model: nn.Module) -> tuple[str, ...]:
    """Patterns of names that the model itself declares as left over in old checkpoints (transformers' convention)."""
    return tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def compare_state(
    slots: Mapping[str, ModelTensor], entries: Mapping[str, StateEntry], *, ignored: tuple[str, ...] = ()
) -> None:
    """Raise one InputError on names that are missing, unknown, or of another shape. Floating dtypes may differ."""
    mismatches, missing = [], []
    for slot in slots.values():
        if not slot.persistent:
            continue
        present = [name for name in slot.names if name in entries]
        mismatches += [p for name in present for p in _mismatch(name, slot.tensor, entries[name])]
        if not present:
            also = f" (nor as {', '.join(slot.names[1:])})" if len(slot.names) > 1 else ""
            missing.append(Problem(path=slot.name, rule=f"is missing{also}; shape {tuple(slot.tensor.shape)}"))
    known = {name for slot in slots.values() for name in slot.names}
    extra = [n for n in entries if n not in known and not any(re.search(pattern, n) for pattern in ignored)]
    unknown = [Problem(path=name, rule="is not a name of the model") for name in extra]
    if mismatches or missing or unknown:
        hint = _prefix_hint([p.path for p in missing], extra)
        counts = f"{len(missing)} missing, {len(unknown)} unknown, {len(mismatches)} mismatching"
        raise InputError(f"the state does not fit the model ({counts}){hint}", [*mismatches, *missing, *unknown])


def _mismatch(name: str, tensor: torch.Tensor, entry: StateEntry) -> list[Problem]:
    if entry.unusable:
        return [Problem(path=name, rule=entry.unusable)]
    problems = []
    if entry.shape != tuple(tensor.shape):
        problems.append(Problem(path=name, rule=f"must have shape {tuple(tensor.shape)}", value=entry.shape))
    if entry.is_floating != (tensor.is_floating_point() or tensor.is_complex()):
        kind = "floating" if entry.is_floating else "integer"
        problems.append(Problem(path=name, rule=f"must be {tensor.dtype}", value=f"{kind} numbers"))
    return problems


def _prefix_hint(missing: list[str], extra: list[str]) -> str:
    """Weights of a base model, or of a wrapped one, differ by a prefix alone."""
    if not missing or not extra:
        return ""
    for longer, shorter, rule in ((missing, extra, "lack"), (extra, missing, "have")):
        for name in longer[:1]:
            prefix = next((name.removesuffix(s) for s in shorter if name.endswith("." + s)), None)
            if prefix and {prefix + s for s in shorter} & set(longer):
                return f"; its names {rule} the prefix {prefix!r}"
    return ""
