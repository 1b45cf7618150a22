"""Plain data as JSON, without loss: what an optimizer, a schedule or a data loader calls its state.

JSON has numbers, text, truth values, null and lists. Everything else is an object with one key:

    {"dict": [[key, value], ...]}       a dict, whose keys may be numbers
    {"counter": [[key, count], ...]}    a collections.Counter
    {"tuple": [...]}                    a tuple
    {"float": "nan"}                    a number that JSON lacks: nan, inf, -inf
    {"tensor": name}, {"array": name}   a tensor, or an array of NumPy, which lies among the tensors
    {"empty": [kind, dtype, shape]}     a tensor or an array without elements

Nothing is pickled. Data of another type is refused.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from autopar.errors import CheckpointError, InputError
from autopar.runtime.checkpoint.manifest import DTYPES

_REMEDY = "keep numbers, text, lists, tuples, dicts and tensors, or pass an object with state_dict()"


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Plain data as JSON has it. Its tensors are added to `tensors` by their path."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), path, tensors)
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is list:
        return [encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if type(value) in (dict, OrderedDict, Counter):
        pairs = [[_key(key, path), encode(v, f"{path}/{key}", tensors)] for key, v in value.items()]
        return {"counter" if type(value) is Counter else "dict": pairs}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return _tensor("array", torch.from_numpy(value.astype(value.dtype.newbyteorder("="))), path, tensors)
    if _is_plain_tensor(value):
        return _tensor("tensor", value.detach(), path, tensors)
    kind = f"a split {type(value).__name__}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise InputError(f"{path.replace('/', '.')} cannot be saved, because it is {kind}; {_REMEDY}")


def _tensor(kind: str, value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Add a tensor under its path, or under a longer name if the keys 1 and "1" lead to one path."""
    if not value.numel():
        return {"empty": [kind, str(value.dtype).removeprefix("torch."), list(value.shape)]}
    while path in tensors:
        path += "~"
    tensors[path] = value
    return {kind: path}


def _key(key: Any, path: str) -> Any:
    if key is None or type(key) in (bool, int, str):
        return key
    raise InputError(f"{path.replace('/', '.')} has the key {key!r}, which is no text and no whole number; {_REMEDY}")


def _is_plain_tensor(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta and value.layout is torch.strided


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `encode` was given."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if isinstance(value, dict) and len(value) == 1:
        ((kind, held),) = value.items()
        if kind in ("dict", "counter") and isinstance(held, list):
            pairs = [(pair[0], decode(pair[1], tensors)) for pair in held if _is_pair(pair)]
            if len(pairs) == len(held):
                return dict(pairs) if kind == "dict" else Counter(dict(pairs))
        if kind == "tuple" and isinstance(held, list):
            return tuple(decode(v, tensors) for v in held)
        if kind == "float" and held in ("nan", "inf", "-inf"):
            return float(held)
        if kind in ("tensor", "array") and isinstance(held, str) and held in tensors:
            return tensors[held] if kind == "tensor" else tensors[held].numpy()
        if kind == "empty" and _is_empty(held):
            array = torch.empty(held[2], dtype=getattr(torch, held[1]))
            return array if held[0] == "tensor" else array.numpy()
    raise CheckpointError(f"the checkpoint holds plain data of an unknown form: {str(value)[:80]}")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and (pair[0] is None or isinstance(pair[0], (bool, int, str)))


def _is_empty(held: Any) -> bool:
    if not (isinstance(held, list) and len(held) == 3 and held[1] in DTYPES and isinstance(held[2], list)):
        return False
    return all(type(size) is int and 0 <= size < 1 << 32 for size in held[2]) and 0 in held[2]


def tensors_named(value: Any) -> list[str]:
    """The names of the tensors in encoded data."""
    if isinstance(value, list):
        return [name for v in value for name in tensors_named(v)]
    if not isinstance(value, dict):
        return []
    names = [held for kind, held in value.items() if kind in ("tensor", "array") and isinstance(held, str)]
    return names + [name for held in value.values() for name in tensors_named(held)]
