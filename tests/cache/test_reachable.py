"""The hash of what a capture depends on: equal in every process, another for each change that a capture can see."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import reachable_model as own
import reachable_settings as settings
import torch
from torch import nn

from autopar.cache.reachable import request_digest
from autopar.capture.request import Reading, Request
from autopar.runtime.distributed.launch import Ranks

X = {"x": torch.ones(4, 8)}


def digest(model: nn.Module, **how: Any) -> str | None:
    return request_digest(Request.of(model, X, **how))


def put(holder: Any, name: str, value: Any) -> Callable[[nn.Module, pytest.MonkeyPatch], None]:
    return lambda model, patch: patch.setattr(holder, name, value)


def of_model(change: Callable[[Any], Any]) -> Callable[[nn.Module, pytest.MonkeyPatch], None]:
    def changed(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
        change(model)

    return changed


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "a global": put(own, "SCALE", 3.0),
    "a global of a module that it imports": put(settings, "FACTOR", 4),
    "a function that a function calls": put(own, "helper", lambda x: x),
    "a function of a package": put(torch.nn.functional, "leaky_relu", lambda x, negative_slope: x),
    "a method of a package's class": put(nn.Linear, "forward", lambda self, x: x),
    "the environment": lambda model, patch: patch.setenv("REACHABLE_DEPTH", "2"),
    "a buffer": of_model(lambda m: m.shift.fill_(5)),
    "a number in a list": of_model(lambda m: m.sizes.append(3)),
    "an argument of a partial function": of_model(lambda m: m.act.keywords.update(negative_slope=0.2)),
    "an attribute of a configuration": of_model(lambda m: setattr(m.conf, "width", 9)),
    "what a closure holds": of_model(lambda m: setattr(m, "late", own.scaled_by(3))),
    "a slot": of_model(lambda m: setattr(m.bound, "low", -2)),
    "a private slot": of_model(lambda m: m.bound.rise()),
    "an item of an own dictionary": of_model(lambda m: m.options.update(depth=2)),
    "an item of an own queue": of_model(lambda m: m.queue.append(2)),
    "an array": of_model(lambda m: m.array.fill(2)),
    "the default device": lambda model, patch: patch.setattr(torch, "get_default_device", lambda: "meta"),
    "eval mode": of_model(lambda m: m.eval()),
    "a hook": of_model(lambda m: m.register_forward_hook(lambda *_: None)),
    "a shape": of_model(lambda m: setattr(m, "layer", nn.Linear(8, 4))),
    "a dtype": of_model(lambda m: m.bfloat16()),
    "what trains": of_model(lambda m: m.layer.bias.requires_grad_(False)),
    "a tied weight": of_model(lambda m: setattr(m.other, "weight", m.layer.weight)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_gives_another_hash(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = own.Model()
    before = digest(model)
    assert before is not None and before == digest(own.Model())
    CHANGES[what](model, monkeypatch)
    assert digest(model) not in (None, before)


@pytest.mark.parametrize(
    ("text", "other"),
    (
        ("lambda x: x.relu()", "lambda x: x.tanh()"),
        ("lambda x: x.sin() - x.cos()", "lambda x: x.cos() - x.sin()"),
        ("lambda x: x.max(1).values.view(-1, 1)", "lambda x: x.min(1).values.view(-1, 1)"),
        ("lambda x: LOW - HIGH * x", "lambda x: HIGH - LOW * x"),
        ("lambda x: (lambda a, b: a - b)(a=x, b=1)", "lambda x: (lambda b, a: b - a)(a=x, b=1)"),
    ),
)
def test_a_function_that_was_typed_at_a_prompt(text: str, other: str) -> None:
    """No file has its text."""
    model = own.Model()
    hashes = []
    for typed in (text, other, text):
        model.late = eval(typed, {"LOW": 1, "HIGH": 2})
        hashes.append(digest(model))
    assert hashes[0] == hashes[2] is not None and hashes[0] != hashes[1]


def test_the_request_and_torch_count() -> None:
    model = own.Model()
    requests = [
        Request.of(model, X),
        Request.of(model, {"x": torch.ones(5, 8)}),
        Request.of(model, {"x": torch.ones(4, 8).double()}),
        Request.of(model, {"x": X["x"], "deep": True}),
        Request.of(model, X, training=False),
        Request.of(model, X, specialise=True),
        Request.of(model, X, partial(own.loss, weight=2)),
        Request.of(model, X, partial(own.loss, weight=3)),
    ]
    for value in (1.0, 2.0):  # of the buffers that a job holds
        reading = Reading(buffers=lambda name, value=value: torch.tensor(value))  # type: ignore[misc]
        requests.append(replace(Request.of(own.Model().to("meta"), X), reading=reading))
    found = [request_digest(one) for one in requests]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(digest(model))
    assert None not in found and len(set(found)) == len(found)


def test_values_of_weights_and_inputs_do_not_count() -> None:
    model = own.Model()
    before = digest(model)
    with torch.no_grad():
        model.layer.weight.add_(1)
    assert digest(model) == before == request_digest(Request.of(model, {"x": torch.randn(4, 8)}))


def test_it_is_equal_in_every_process() -> None:
    """Hashes of texts and ids of objects differ from process to process."""
    with Ranks(1) as other:
        ((seed, *found),) = other.run("reachable_model:digests")
    here, *expected = own.digests(0)
    assert found == expected and None not in found
    assert seed != here or "PYTHONHASHSEED" in os.environ


def test_a_value_that_hides_its_content_is_not_known() -> None:
    class Hidden:
        __slots__ = ()

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError

    model = own.Model()
    model.hidden = Hidden()
    assert digest(model) is None


def test_an_object_that_raises_when_it_is_read_is_not_known() -> None:
    class Closed:
        __slots__ = ("handle",)

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("the file is closed")

    model = own.Model()
    model.sizes.append(Closed())
    assert digest(model) is None
