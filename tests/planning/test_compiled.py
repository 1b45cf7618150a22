"""Functions of the API take a model that `torch.compile` or `DataParallel` wrapped, as the model itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from input_models import Logits, built, tensors
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.testing import check_equivalence

X, Y, _ = tensors()
GIVEN: dict[str, Any] = {"example_inputs": (X, Y), "loss_fn": F.cross_entropy}


def planned(model: nn.Module) -> Any:
    found = autopar.plan(model, "2xcpu", global_batch=4, **GIVEN)
    assert found.plan is not None
    return found.model, found.plan.to_dict()


def estimated(model: nn.Module) -> Any:
    return autopar.estimate(model, "2xcpu", {"tp": 2}, **GIVEN).to_dict()


def covered(model: nn.Module) -> Any:
    return autopar.coverage(model, "2xcpu", plan={"tp": 2}, **GIVEN).to_dict()


def captured(model: nn.Module) -> Any:
    program = autopar.capture_program(model, (X, Y), loss_fn=F.cross_entropy)
    return list(program.parameters), program.fingerprint


def checked(model: nn.Module) -> Any:
    one = check_equivalence(model, (X, Y), tp=2, loss_fn=F.cross_entropy)
    return one.errors.keys()


@pytest.mark.parametrize("function", (planned, estimated, covered, captured, checked))
def test_a_compiled_model_is_the_model_itself(function: Callable[[nn.Module], Any]) -> None:
    compiled: Any = torch.compile(built(Logits))
    assert function(built(Logits)) == function(compiled)


def test_a_wrapped_model_is_the_model_itself() -> None:
    assert captured(nn.DataParallel(built(Logits))) == captured(built(Logits))
    compiled: Any = torch.compile(nn.DataParallel(built(Logits)))
    assert captured(compiled) == captured(built(Logits))
