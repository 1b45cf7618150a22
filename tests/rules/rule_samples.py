"""Sample calls per operator, drawn at random: arguments with real tensors, for the rule proof.

An operator's entry is a function of `Draw` that returns its positional arguments, or a pair of them and keywords.
Pointwise operators are entries of `rule_samples_pointwise`.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Arguments = tuple[Any, ...] | tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """Random sizes, tensors and choices from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def size(self) -> int:
        return self.rng.choice([1, 2, 3, 4, 6, 6])

    def sizes(self, low: int, high: int | None = None) -> list[int]:
        return [self.size() for _ in range(self.rng.randint(low, low if high is None else high))]

    def split(self) -> int:
        """A size that can be split."""
        return self.rng.choice([2, 4, 6])

    def real(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.torch, dtype=torch.float64)

    def ids(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.torch)

    def mask(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.torch) < 0.6

    def choice(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def yes(self) -> bool:
        return self.rng.random() < 0.5

    def dim(self, rank: int) -> int:
        return self.rng.randrange(-rank, rank) if rank else 0

    def some_dims(self, rank: int, low: int = 1) -> list[int]:
        found = self.rng.sample(range(rank), self.rng.randint(min(low, rank), rank))
        return [d - rank if self.yes() else d for d in found]

    def broadcastable(self, shape: list[int]) -> list[int]:
        """A shape that broadcasts to `shape`."""
        kept = shape[self.rng.randint(0, len(shape)) :] if self.yes() else shape
        return [1 if self.rng.random() < 0.2 else size for size in kept]


Sampler = Callable[[Draw], Arguments]
SAMPLES: dict[Any, Sampler] = {}


def sampler(*targets: Any) -> Callable[[Sampler], Sampler]:
    def register(function: Sampler) -> Sampler:
        for target in targets:
            assert target not in SAMPLES, f"two samples for {target}"
            SAMPLES[target] = function
        return function

    return register


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """Mark an operand that its operator has no gradient for."""
    tensor.is_constant = True  # type: ignore[attr-defined]
    return tensor


def one_tensor(*more: Any, low: int = 1, high: int = 3) -> Sampler:
    """A tensor of some rank, followed by fixed arguments."""
    return lambda d: (d.real(*d.sizes(low, high)), *more)


def along_dim(*more: Any) -> Sampler:
    """A tensor and one of its dimensions."""

    def draw(d: Draw) -> Arguments:
        shape = d.sizes(1, 3)
        return (d.real(*shape), d.dim(len(shape)), *more)

    return draw
