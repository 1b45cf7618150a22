"""The leaves of nested inputs by name: ``batch.tokens`` is the key ``tokens`` of the argument ``batch``."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

from autopar._torch.private import pytree
from autopar.errors import InputError


def named_leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of every value, in order: tensors, numbers, texts and None."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if is_dataclass(leaf) and not isinstance(leaf, type):
                kind = type(leaf).__name__
                raise InputError(
                    f"input {name!r} is a {kind}, a dataclass whose fields PyTorch does not know; call "
                    f"torch.export.register_dataclass({kind}) once"
                )
            named[".".join([name, *map(_key, path)])] = leaf
    return named


def map_leaves(values: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The values in their structure, with every leaf replaced by `change(name, leaf)`."""
    changed = {}
    for name, value in values.items():
        leaves, spec = pytree.tree_flatten(value)
        names = named_leaves({name: value})
        changed[name] = pytree.tree_unflatten([change(*pair) for pair in zip(names, leaves, strict=True)], spec)
    return changed


def _key(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
