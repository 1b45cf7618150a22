"""Plain data as JSON: what is encoded is decoded as it was, type by type, and nothing else is made."""

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import CheckpointError, InputError
from autopar.runtime.checkpoint.plain import decode, encode, tensors_named

KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6))


def _compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    return st.one_of(lists, lists.map(tuple), st.dictionaries(KEYS, inner, max_size=3))


def through_json(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(value, "extra", tensors)
    text = json.dumps(encoded, allow_nan=False)
    assert sorted(tensors_named(json.loads(text))) == sorted(tensors)
    return decode(json.loads(text), tensors), tensors


def same(one: Any, other: Any) -> bool:
    """Equal in type, order and value. NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.keys()), list(other.keys())) and same(list(one.values()), list(other.values()))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


@given(st.recursive(LEAVES, _compound, max_leaves=12))
def test_what_goes_in_comes_out(value: Any) -> None:
    """Also keys of numbers, -0.0, and dicts that look like the encoding itself."""
    found, tensors = through_json(value)
    assert same(found, value) and not tensors


@pytest.mark.parametrize(
    "value",
    [
        {"tensor": "extra/a"},
        {"dict": [[1, 2]]},
        {"empty": ["tensor", "float32", [0]]},
        {"float": "nan"},
        {1: "one", "1": "text", False: "no number"},
        {"a": torch.arange(3), "b": [torch.tensor(2.5, dtype=torch.bfloat16), (torch.zeros(0, 3),)]},
        {1: torch.ones(2), "1": torch.zeros(2)},  # both are extra/1
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 2), dtype=np.float32),
        np.array(3.5),
        np.array([True, False]),
        Counter({3: 2, 5: -1}),
        [float("nan"), float("inf"), -float("inf")],
        2**80,
    ],
    ids=str,
)
def test_cases(value: Any) -> None:
    assert same(through_json(value)[0], value)


def test_types_that_become_plain() -> None:
    assert same(through_json(np.float32(0.5))[0], 0.5)
    assert same(through_json(OrderedDict(a=1, b=2))[0], {"a": 1, "b": 2})
    assert same(through_json(torch.Size([2, 3]))[0], (2, 3))
    parameter = torch.nn.Parameter(torch.ones(2))
    found = through_json(parameter)[0]
    assert type(found) is torch.Tensor and not found.requires_grad


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: 0, r"extra.a.1 cannot be saved, because it is a function"),
        ({3}, "it is a set"),
        (1j, "it is a complex"),
        (b"bytes", "it is a bytes"),
        (np.array(["text"]), "it is a ndarray"),
        (np.array([object()]), "it is a ndarray"),
        (torch.device("cpu"), "it is a device"),
        (torch.empty(2, device="meta"), "it is a split Tensor"),
        (torch.eye(2).to_sparse(), "it is a split Tensor"),
        ({(1, 2): 3}, r"has the key \(1, 2\)"),
        ({0.5: 3}, "has the key 0.5"),
    ],
)
def test_other_data_is_refused(value: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        encode({"a": [0, value]}, "extra", {})


@pytest.mark.parametrize(
    "encoded",
    [
        {},
        {"a": 1, "b": 2},
        {"pickle": "gASV"},
        {"dict": [["a"]]},
        {"dict": [[["a"], 1]]},
        {"dict": {"a": 1}},
        {"float": "1e5"},
        {"float": 1},
        {"tensor": "missing"},
        {"tensor": ["here"]},
        {"empty": ["tensor", "object", [0]]},
        {"empty": ["tensor", "float32", [2]]},
        {"empty": ["tensor", "float32", [0, -1]]},
        {"empty": ["tensor", "float32", [True, 0]]},
        {"empty": ["tensor", "float32", [0, 2**40]]},
        {"tuple": "ab"},
        [{"exec": "1"}],
    ],
    ids=str,
)
def test_unknown_forms_are_refused(encoded: Any) -> None:
    with pytest.raises(CheckpointError, match="plain data of an unknown form"):
        decode(encoded, {"here": torch.ones(1)})
