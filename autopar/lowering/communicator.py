"""What generated code asks of a mesh dimension and of a random stream.

`autopar.runtime` implements both. Its dry run (`autopar.runtime.dry_run`) has mesh dimensions without other ranks.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Communicator(Protocol):
    """One dimension of the mesh, as one of its ranks sees it. What begins with `start_` is not waited for (`wait`)."""

    @property
    def name(self) -> str: ...

    @property
    def degree(self) -> int:
        """How many ranks the dimension has."""

    def index(self) -> torch.Tensor | int:
        """This rank's coordinate on the dimension; a tensor if all ranks run in one process."""

    def apply(self, x: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`function(coordinate, x)` of this rank."""

    def all_reduce(self, x: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        """The sum or the maximum ("max") of `x` over the ranks."""

    def start_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, stacked along dimension 0."""

    def start_reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's chunk along dimension 0 of the sum over the ranks."""

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Chunk k along dimension 0 goes to rank k."""

    def exchange(self, x: torch.Tensor, to: int) -> torch.Tensor:
        """`x` goes to the rank at coordinate `to`. The result is what the one rank sends that names this rank."""

    def start_shift(self, x: torch.Tensor) -> torch.Tensor:
        """`x` goes to the next rank, and the last rank's to the first. The result comes from the rank before."""

    def all_to_all_rows(self, x: torch.Tensor, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """`sent[k]` rows of `x` go to rank k, and `received[k]` rows come from it. Counts are on the host."""

    def to_host(self, counts: torch.Tensor) -> torch.Tensor:
        """`counts` in host memory. This waits for the device."""

    def rows_of_part(self, x: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`function(coordinate, x)` of this rank, some elements of the last dimension of x[0]. It reads values."""

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        """The result of a collective that was started."""


class RandomNumbers(Protocol):
    """Random numbers for values that the same mesh dimensions split."""

    @property
    def training(self) -> bool:
        """Whether dropout drops anything."""

    def position(self) -> Any:
        """What the next draws depend on."""

    def go_to(self, position: Any) -> None:
        """The next draws are the draws at an earlier `position`."""

    def keep_mask(self, x: torch.Tensor, probability: float) -> torch.Tensor:
        """A boolean mask shaped like `x`, False with `probability`."""

    def run(self, operator: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """An operator that draws from torch's default generator."""
