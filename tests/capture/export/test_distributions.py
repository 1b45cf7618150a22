"""Distributions check their arguments; a captured model is the model without these checks."""

import tiny_models
import torch
from one_layer import checked_program, squared
from torch.distributions import Categorical, Distribution, Normal

from autopar.capture.program import capture_program


def likelihood(y: torch.Tensor) -> torch.Tensor:
    return Normal(y, y.exp()).log_prob(y * 2) + Categorical(logits=y).entropy()[:, None]


def test_a_distribution_of_activations_is_captured() -> None:
    model = tiny_models.randomise(squared(likelihood).double())
    before = Distribution._validate_args
    checked_program(model, torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert Distribution._validate_args == before


def test_checks_of_activations_that_a_model_asks_for_are_noted() -> None:
    model = squared(lambda y: Normal(y, y.exp(), validate_args=True).log_prob(y)).double()
    checked_program(model, x := torch.randn(4, 6, dtype=torch.float64))
    notes = capture_program(model, {"x": x}).notes
    assert any(
        "test_distributions.py:" in one and "is not checked, because it depends on the p" in one for one in notes
    )
