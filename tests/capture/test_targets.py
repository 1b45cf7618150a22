"""Which inputs can mark samples to be ignored: found on the graph, refused where padding could be noticed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.analysis import analyse
from autopar.capture.program import capture_program
from autopar.capture.targets import ignored_targets

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(6, 10), loss

    def forward(self, x: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layer(x), answers)


def plain(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten())


def shifted(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].reshape(-1), ignore_index=-7)


def ignoring_class_zero(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=0)


def filled(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), F.pad(t[:, 1:], (0, 1), value=-100).flatten(), label_smoothing=0.1)


def wrongly_filled(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), F.pad(t[:, 1:], (0, 1), value=0).flatten())


def computed(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), (t % 10).flatten())


def summed(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum")


def with_penalty(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    total = F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum") + y.square().sum()
    return total / (t != -100).sum()


def other_count(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum") / (t != 3).sum()


def mean_of_squares(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (y.sum(-1) - t).square().mean()


def squares(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return y.square().mean(-1)


def weighted(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (squares(y, t) * t).sum() / t.sum()


def weighted_everywhere(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mask = t.to(y.dtype).unsqueeze(-1)
    return (mask * y.square()).flatten().sum() / mask.sum()


def weighted_sum(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (squares(y, t) * t).sum()


def weighted_mean(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (squares(y, t) * t).mean()


def weight_used_twice(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (squares(y.masked_fill(t.unsqueeze(-1) == 0, -1e9).softmax(1), t) * t).sum() / t.sum()


def other_weight(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (squares(y, t) * t).sum() / (t + 1).sum()


@pytest.mark.parametrize(
    "loss, expected",
    (
        (plain, {"answers": -100}),
        (shifted, {"answers": -7}),
        (ignoring_class_zero, {"answers": 0}),
        (filled, {"answers": -100}),
        (wrongly_filled, None),
        (computed, None),
        (summed, {"answers": -100}),
        (with_penalty, None),
        (other_count, None),
        (mean_of_squares, None),
        (weighted, {"answers": 0}),
        (weighted_everywhere, {"answers": 0}),
        (weighted_sum, {"answers": 0}),
        (weighted_mean, None),
        (weight_used_twice, None),
        (other_weight, None),
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_where_samples_can_be_ignored(loss: Loss, expected: dict[str, int] | None) -> None:
    program = capture_program(Model(loss), {"x": torch.zeros(4, 5, 6), "answers": torch.zeros(4, 5, dtype=torch.int64)})
    assert ignored_targets(program, analyse(program)) == expected
