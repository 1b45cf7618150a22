"""The dry run's stand-ins for other ranks and random streams: tensors without data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class SilentDim:
    """A mesh dimension of generated code (a `Communicator`) that sends nothing."""

    name: str
    degree: int
    coordinate: int

    def __repr__(self) -> str:
        return f"<{self.name}: {self.degree} ranks>"

    def index(self) -> int:
        return self.coordinate

    def apply(self, x: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(self.coordinate, x)

    def all_reduce(self, x: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def start_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((x.shape[0] * self.degree, *x.shape[1:]))

    def start_reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((x.shape[0] // self.degree, *x.shape[1:]))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def exchange(self, x: torch.Tensor, to: int) -> torch.Tensor:
        return torch.empty_like(x)

    def start_shift(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def all_to_all_rows(self, x: torch.Tensor, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """As many rows come as go: the expected number."""
        return torch.empty_like(x)

    def to_host(self, counts: torch.Tensor) -> torch.Tensor:
        return counts

    def rows_of_part(self, x: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """An even part: the expected number of rows."""
        return x[0, : x.shape[1] // self.degree]

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        return x


class NoNumbers:
    """Random streams without numbers: drawn tensors have the right shape, saved tensors the right size."""

    training = True

    def position(self) -> None:
        """No draw depends on anything."""

    def go_to(self, position: None) -> None:
        """Nothing to go back to."""

    def keep_mask(self, x: torch.Tensor, probability: float) -> torch.Tensor:
        return torch.empty_like(x, dtype=torch.bool)

    def run(self, operator: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        return operator(*args, **kwargs)
