"""The public checks: correct models pass, a wrong rule is found, and impossible requests are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_labels import check_random_labels
from torch import nn

from autopar import testing
from autopar.errors import InputError, VerificationError
from autopar.rules.registry import register_rule

CROSS_ENTROPY = nn.functional.cross_entropy
BATCH = (torch.randn(4, 8), torch.arange(4))
CHECKS: list[Callable[..., Any]] = [testing.check_equivalence, check_random_labels]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Dropout(0.5), nn.Linear(12, 4))


@pytest.mark.parametrize("check", CHECKS)
def test_a_correct_model_passes_and_is_left_as_it_was(check: Callable[..., Any]) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(model, BATCH, tp=2, dp=2, loss_fn=CROSS_ENTROPY)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert next(model.parameters()).dtype is torch.float32 and next(model.parameters()).grad is None


def test_every_gradient_is_compared() -> None:
    report = testing.check_equivalence(network(), BATCH, tp=2, dp=2, loss_fn=CROSS_ENTROPY)
    gradients = {f"gradient {name}" for name, _ in network().named_parameters()}
    assert gradients | {"loss", "equal copies"} <= report.errors.keys()
    assert str(report).startswith(f"{len(report.errors)} values compared on dp 2, tp 2: largest relative error ")


@pytest.mark.parametrize("check", CHECKS)
def test_frozen_parameters_have_no_gradient(check: Callable[..., Any]) -> None:
    """The values before the first trained layer have no gradient either, so nothing sums theirs over ranks."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    model[0].requires_grad_(False)
    found = check(model, BATCH, tp=2, dp=2, loss_fn=CROSS_ENTROPY)
    for report in found if isinstance(found, list) else (found,):
        assert "gradient 2.weight" in report.errors
        assert "gradient 0.weight" not in report.errors


@torch.library.custom_op("test_checks::reversed", mutates_args=())
def in_reverse(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1)


in_reverse.register_fake(torch.empty_like)
in_reverse.register_autograd(lambda ctx, grad: grad.flip(-1))


class WithOwnOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(in_reverse(self.first(x)))
        return out


def test_a_wrong_rule_is_found() -> None:
    register_rule(in_reverse, "... n -> ... n", linear=[[0]])  # n must be whole
    with pytest.raises(VerificationError, match=r"differs from one device: .*prove_rule"):
        testing.check_equivalence(WithOwnOperator(), BATCH, tp=2, loss_fn=CROSS_ENTROPY)
    with pytest.raises(AssertionError, match="random labels of seed"):
        check_random_labels(WithOwnOperator(), BATCH, tp=2, loss_fn=CROSS_ENTROPY)
    with pytest.raises(VerificationError, match=r"\['n\.0'\]"):
        testing.prove_rule(in_reverse, [(torch.randn(3, 4).double(),)])


def test_a_degree_is_a_positive_number() -> None:
    with pytest.raises(InputError, match="tp must be a whole number of at least 1, got 0"):
        testing.check_equivalence(network(), BATCH, tp=0, loss_fn=CROSS_ENTROPY)


def test_a_model_on_meta_has_no_weights_to_compute_with() -> None:
    with torch.device("meta"):
        model = network()
    with pytest.raises(InputError, match="the model is on meta"):
        testing.check_equivalence(model, BATCH, tp=2, loss_fn=CROSS_ENTROPY)


def test_the_face_is_lazy_and_knows_its_names() -> None:
    assert all(callable(getattr(testing, name)) for name in testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'check_everything'"):
        testing.check_everything  # noqa: B018
