"""Names of transformers on disk: files of weights may name and cut tensors otherwise than the model does.

The files of Mixtral, for example, have one tensor for each expert, and the model has all experts in one. transformers
says how to convert both ways. Here one tensor of the model is converted at a time.
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.parameters.state_loading import StateEntry


def is_pretrained(model: nn.Module | None) -> bool:
    """Whether a model is one of transformers. Nothing is imported for it."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


def name_to_keep(model: nn.Module | None, names: Sequence[str]) -> str:
    """Of a tied tensor's names, the one that transformers initialises and saves: the others are tied to it."""
    tied_to: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return next((tied_to[name] for name in names if tied_to.get(name) in names), names[0])


def pieces_on_disk(model: Any, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a file that make up one tensor of a model of transformers, perhaps on meta."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, {name: value}))


def layout_on_disk(model: Any, wholes: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a file for each tensor of the model, all on meta."""
    from transformers.core_model_loading import revert_weight_conversion

    on_disk = {name: pieces_on_disk(model, name, value) for name, value in wholes.items()}
    alone = {name: piece.shape for pieces in on_disk.values() for name, piece in pieces.items()}
    together = {name: piece.shape for name, piece in revert_weight_conversion(model, dict(wholes)).items()}
    if alone != together:
        differing = sorted(alone.keys() ^ together.keys())[:3]
        raise InputError(
            f"{type(model).__name__} cannot be exported one tensor at a time ({', '.join(differing)}); gather its "
            "weights from parallel.state_dict() and call save_pretrained"
        )
    return on_disk


def named_as_in_model(model: nn.Module, entries: Mapping[str, StateEntry]) -> dict[str, StateEntry]:
    """A state's entries under the names of a model of transformers. Joined tensors are made when loaded."""
    conversions = _conversions(model)
    if not conversions:
        return dict(entries)
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    renamed: dict[str, StateEntry] = {}
    joined: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        if target not in names:
            renamed[name] = entries[name]  # the comparison with the model names it
        elif pattern is None:
            renamed[target] = entries[name]
        else:
            converter = next(c for c in converters if pattern in c.source_patterns)
            joined.setdefault(target, (converter, []))[1].append((name, pattern))
    for target, (converter, parts) in joined.items():
        renamed |= _joined(model, target, converter, parts, entries)
    return renamed


def _conversions(model: nn.Module) -> list[Any]:
    if not is_pretrained(model):
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def _joined(
    model: nn.Module, target: str, converter: Any, parts: list[tuple[str, str]], entries: Mapping[str, StateEntry]
) -> dict[str, StateEntry]:
    """The tensors of the model that a converter makes of some entries: `target`, and perhaps others."""
    unusable = next((entries[name].unusable for name, _ in parts if entries[name].unusable), None)

    def made(*, on_meta: bool) -> dict[str, torch.Tensor]:
        twin = copy.deepcopy(converter)
        for name, pattern in parts:
            value = torch.empty(entries[name].shape, device="meta") if on_meta else entries[name].load()
            twin.add_tensor(target, name, pattern, value)
        results = twin.convert(target, model=model, config=model.config)
        return {name: v[0] if isinstance(v, list) else v for name, v in results.items()}

    def load(name: str) -> torch.Tensor:
        return made(on_meta=False)[name]

    try:
        shapes = {name: tuple(t.shape) for name, t in made(on_meta=True).items()}
    except Exception as error:  # whatever transformers raises for tensors that do not belong together
        names = ", ".join(name for name, _ in parts[:3])
        raise InputError(f"{names} and others do not make up {target}: {type(error).__name__}: {error}") from None
    is_floating = all(entries[name].is_floating for name, _ in parts)
    return {
        name: StateEntry(shape=shape, is_floating=is_floating, load=partial(load, name), unusable=unusable)
        for name, shape in shapes.items()
    }
