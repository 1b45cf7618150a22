"""The census of operators: outcomes of models, and the tables made of them."""

import sys

import pytest
import torch
from script import ROOT, script
from torch import nn

sys.path.insert(0, str(ROOT / "tools"))
census = script("tools/operator_census.py")


class Reads(nn.Module):
    """Reads a value in its forward pass, which no capture can follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() * float(x.sum())


@torch.library.custom_op("census::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    """An operator that no rule knows."""
    return x * 2


@unknown.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


unknown.register_autograd(lambda ctx, gradient: gradient * 2)


class Odd(nn.Module):
    """A linear layer, and an operator that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return unknown(self.layer(x)).mean()


def outcome(build: object) -> dict[str, object]:
    entry = census.Entry(package="own", name="model", build=build)
    found: dict[str, object] = census.measured(entry)
    return found


def test_a_model_is_split_refused_or_not_built() -> None:
    def classifier() -> object:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        return census.census_models.classifier(model, torch.randn(4, 64))

    found = outcome(classifier)
    assert found["outcome"] == "split"
    assert found["share"] == pytest.approx(1.0)
    assert found["operators"]["linear"] == (2, 0, 2 * 4 * (64 * 128 + 128 * 10))  # type: ignore[index]

    found = outcome(lambda: (Reads(), (torch.randn(4, 64),), None))
    assert (found["outcome"], str(found["reason"])[:13]) == ("refused", "CaptureError:")

    found = outcome(lambda: (Odd(), (torch.randn(4, 64),), None))
    (calls, without_rule, _) = found["operators"]["unknown"]  # type: ignore[index]
    assert calls == without_rule == 1

    def broken() -> object:
        raise KeyError("no such name")

    assert outcome(broken) == {"outcome": "not built", "reason": "KeyError: 'no such name'"}


def test_the_tables_count_by_package_and_reason() -> None:
    def refusal(line: int) -> dict[str, object]:
        return {"outcome": "refused", "reason": f"CaptureError: module 'a.{line}' (Net), /x/y.py:{line}: reads data"}

    text = census.tables(
        {
            "one/a": {"outcome": "split", "share": 1.0, "operators": {"linear": (2, 0, 75), "eigh": (1, 1, 25)}},
            "one/b": refusal(1),
            "two/c": refusal(2),
            "two/d": {"outcome": "not built", "reason": "KeyError"},
        }
    )
    assert "3 models of 2 packages" in text
    assert "| one | 2 | 1 | 0 | 1 | 0 | 0 |" in text
    assert "| all | 3 | 1 | 0 | 2 | 0 | 0 |" in text
    assert "| CaptureError: …, …: reads data | 2 |" in text
    assert "| `eigh` | 1 | 1 | 25.0% |" in text
    assert "`linear`" not in text
    assert "Captured: 33.3%" in text


def test_a_share_of_the_models_is_picked_by_name() -> None:
    names = [f"model {i}" for i in range(1000)]
    tenth = [name for name in names if census.picked(name) < 0.1]
    assert 60 < len(tenth) < 140
    assert set(tenth) < {name for name in names if census.picked(name) < 0.2}
