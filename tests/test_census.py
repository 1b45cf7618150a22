"""The census of operators: outcomes of models, and the tables made of them."""

import sys

import pytest
import torch
from script import ROOT, script
from torch import nn

sys.path.append(str(ROOT / "tools"))
census = script("tools/operator_census.py")


class Reads(nn.Module):
    """Reads a value of its weight in its forward pass, which no capture can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean() * float(self.layer.weight.sum())


class Checks(nn.Module):
    """Checks a value of its input, which a capture follows."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(64, 64), most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > self.most:
            raise ValueError("too large")
        return self.layer(x).square().mean()


class Branches(Checks):
    """Takes a branch by a value of its input, which a capture with `specialise` follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / 2 if x.abs().max() > 1 else x)


class OwnDevice(nn.Module):
    """Makes a tensor on the CPU, which a model on meta cannot use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            raise RuntimeError("unsupported")
        return self.layer(x).square().mean()


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


def test_a_refused_model_is_tried_as_a_user_would() -> None:
    found = outcome(lambda: (Branches(100.0), (torch.randn(4, 64),), None))
    assert (found["outcome"], found["specialise"]) == ("split", True)
    found = outcome(lambda: (Checks(100.0), (torch.randn(4, 63),), None))
    assert (found["outcome"], "RuntimeError" in str(found["reason"])) == ("fails alone", True)
    found = outcome(lambda: (OwnDevice(), (torch.randn(4, 64),), None))
    assert (found["outcome"], "specialise" in found) == ("split", False)


def test_the_first_inputs_that_a_model_runs_with_are_taken() -> None:
    first_that_runs, classifier = census.census_models.first_that_runs, census.census_models.classifier
    widths = (32, 64, 128)
    model = nn.Sequential(nn.Linear(64, 10))
    candidates = [lambda n=n: classifier(model, torch.randn(4, n)) for n in widths]
    assert first_that_runs(candidates)[1][0].shape == (4, 64)
    assert first_that_runs(candidates[:1])[1][0].shape == (4, 32)  # counted as a model that fails alone
    with pytest.raises(ValueError, match="no size"):
        first_that_runs([broken_size])


def broken_size() -> object:
    raise ValueError("no size")


def test_the_tables_count_by_package_and_reason() -> None:
    def refusal(line: int) -> dict[str, object]:
        return {"outcome": "refused", "reason": f"CaptureError: module 'a.{line}' (Net), /x/y.py:{line}: reads data"}

    text = census.tables(
        {
            "one/a": {"outcome": "split", "share": 1.0, "operators": {"linear": (2, 0, 75), "eigh": (1, 1, 25)}},
            "one/b": refusal(1),
            "two/c": refusal(2),
            "two/d": {"outcome": "not built", "reason": "KeyError"},
            "two/e": {"outcome": "fails alone", "reason": "CaptureError: own error"},
            "two/f": {"outcome": "partly split", "share": 0.5, "operators": {}, "specialise": True},
        }
    )
    assert "5 models of 2 packages were built from their configurations. 4 of them run alone" in text
    assert "| one | 2 | 1 | 0 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "| all | 5 | 1 | 1 | 2 | 0 | 0 | 1 | 1 |" in text
    assert "| CaptureError: …, …: reads data | 2 |" in text
    assert "own error" not in text
    assert "| `eigh` | 1 | 1 | 25.0% |" in text
    assert "`linear`" not in text
    assert "Captured: 50.0% (25.0% as they are, and 25.0% with `specialise=True`)" in text
    assert "split at tp = 2: 25.0%." in text


def test_a_share_of_the_models_is_picked_by_name() -> None:
    names = [f"model {i}" for i in range(1000)]
    tenth = [name for name in names if census.picked(name) < 0.1]
    assert 60 < len(tenth) < 140
    assert set(tenth) < {name for name in names if census.picked(name) < 0.2}
