"""A model that reaches values in every way that `autopar.cache.reachable` follows."""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy as np
import reachable_settings
import torch
from torch import nn
from torch.nn import functional

SCALE = 2.0


@dataclass
class Conf:
    width: int = 8
    names: frozenset[str] = frozenset({"a", "b", "c"})


class Bound:
    __slots__ = ("__high", "low")

    def __init__(self) -> None:
        self.low, self.__high = -1, 1

    def rise(self) -> None:
        self.__high += 1


class Options(dict[str, int]):
    """A dictionary of an own class, as many configurations are."""


class Queue(deque[int]):
    """A container of C with attributes."""


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE * reachable_settings.FACTOR * int(os.environ.get("REACHABLE_DEPTH", "1"))


def scaled_by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


def loss(output: torch.Tensor, target: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    return functional.mse_loss(output, target) * weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.conf, self.bound, self.sizes, self.late = Conf(), Bound(), [1, 2], scaled_by(2)
        self.options, self.queue, self.array = Options(depth=1), Queue([1]), np.ones(3)
        self.act = partial(functional.leaky_relu, negative_slope=0.1)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.late(self.act(helper(self.other(self.layer(x))) + self.shift)).clamp(self.bound.low)
        return x.sum() if self.conf.width in (8, 9) and "a" in {"a", "b"} else x.mean()


def digests(rank: int) -> list[int | str | None]:
    """This process's hash of a text, and the digests of this model and of one of transformers.

    The files that a process happens to load are left out.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    from autopar.cache import reachable
    from autopar.capture.request import Request

    ids = torch.zeros(2, 8, dtype=torch.long)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32)
    own = Request.of(Model(), {"x": torch.ones(4, 8)})
    other = Request.of(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})
    with mock.patch.object(reachable, "own_files", tuple):
        return [hash("text"), *map(reachable.request_digest, (own, other))]
