"""The order of a dataset's samples, a function of (seed, epoch) alone.

A shuffled order is a permutation that is computed, not stored. It is a Feistel network over the smallest domain of 4^h
numbers that holds the dataset. It is applied again while the result lies outside of the dataset (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002, section 6). Only integer arithmetic modulo 2^64 is used, so the order is
equal on every machine and with every version of torch and NumPy. Any place in the order costs the same.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_END = object()
_ROUNDS = 8
_LEAST_HALF_BITS = 4  # a smaller domain has too few permutations
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64, as are the shifts below

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The order of `length` samples in one epoch. Without `shuffle` it is the dataset's own."""

    length: int
    seed: int
    epoch: int
    shuffle: bool = True

    def at(self, places: Any) -> Indices:
        """The samples at places of the order, which are below `length`."""
        indices = np.asarray(places, dtype=np.int64)
        if not self.shuffle or not indices.size:
            return indices
        half = max(_LEAST_HALF_BITS, -(-(self.length - 1).bit_length() // 2))
        keys = [np.uint64(number_of(self.seed, self.epoch, turn)) for turn in range(_ROUNDS)]
        values = _permuted(indices.astype(np.uint64), half, keys)
        while (outside := values >= self.length).any():
            values[outside] = _permuted(values[outside], half, keys)
        return values.astype(np.int64)


def number_of(*parts: int) -> int:
    """A number of 64 bits that depends on all parts and on nothing else."""
    return int.from_bytes(hashlib.sha256(",".join(map(str, parts)).encode()).digest()[:8], "big")


def _permuted(values: NDArray[np.uint64], half: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


# Random numbers of datasets: functions of the sample, and none of the training loop's.


def seed_draws(number: int) -> None:
    """Seed the generators of torch (CPU), NumPy and Python that datasets draw from."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


@contextmanager
def kept_draws() -> Iterator[None]:
    states = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.random.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def undisturbed(items: Iterable[Any]) -> Iterator[Any]:
    """The items. The loop around them draws the same random numbers as if the items drew none."""
    with kept_draws():
        iterator = iter(items)
    while True:
        with kept_draws():
            item = next(iterator, _END)
        if item is _END:
            return
        yield item
