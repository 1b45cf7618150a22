"""Random numbers of datasets: functions of the sample, and none of the training loop's."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_END = object()


def seed_draws(number: int) -> None:
    """Seed the generators of torch (CPU), NumPy and Python that datasets draw from."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


@contextmanager
def _kept_draws() -> Iterator[None]:
    states = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.random.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def undisturbed(items: Iterable[Any]) -> Iterator[Any]:
    """The items. The loop around them draws the same random numbers as if the items drew none."""
    with _kept_draws():
        iterator = iter(items)
    while True:
        with _kept_draws():
            item = next(iterator, _END)
        if item is _END:
            return
        yield item
