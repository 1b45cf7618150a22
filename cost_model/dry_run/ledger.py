"""The dry run's stand-in for ranks: a ledger of collectives, and tensors without data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.cost_model.machine.collectives import sent_bytes
from autopar.lowering.conversions import Collective


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """Collectives of one kind over one mesh dimension: calls, bytes of the operand, and bytes sent by this rank.

    `bytes` counts the operand: the shard of an all-gather, the whole tensor of a reduce-scatter or an all-reduce.
    `sent_bytes` counts the bytes that one rank sends over the wire under ring algorithms
    (`autopar.cost_model.machine.collectives`).
    """

    calls: int = 0
    bytes: int = 0
    sent_bytes: float = 0.0

    def __add__(self, other: "CollectiveTotal") -> "CollectiveTotal":
        return CollectiveTotal(self.calls + other.calls, self.bytes + other.bytes, self.sent_bytes + other.sent_bytes)

    def __mul__(self, times: int) -> "CollectiveTotal":
        return CollectiveTotal(self.calls * times, self.bytes * times, self.sent_bytes * times)


def collective(kind: Collective, ranks: int, operand_bytes: int) -> CollectiveTotal:
    """One collective of a rank that puts in so many bytes."""
    whole = operand_bytes * ranks if kind in ("all_gather", "all_to_all", "exchange", "shift") else operand_bytes
    return CollectiveTotal(1, operand_bytes, sent_bytes(kind, whole, ranks))


Key = tuple[str, str]  # mesh dimension, kind
Sends = Mapping[Key, CollectiveTotal]


@dataclass(slots=True)
class Ledger:
    """The recorded collectives, summed by (mesh dimension, kind)."""

    entries: dict[Key, CollectiveTotal] = field(default_factory=dict)

    def add(self, mesh_dim: str, kind: str, traffic: CollectiveTotal, times: int = 1) -> None:
        if times and traffic.calls:
            key = (mesh_dim, kind)
            self.entries[key] = self.entries.get(key, CollectiveTotal()) + traffic * times

    def add_all(self, sends: Sends, times: int = 1) -> None:
        for (mesh_dim, kind), traffic in sends.items():
            self.add(mesh_dim, kind, traffic, times)

    def take(self) -> dict[Key, CollectiveTotal]:
        """The entries since the last call."""
        found = dict(self.entries)
        self.entries.clear()
        return found


@dataclass(frozen=True, eq=False)
class PricedDim:
    """A mesh dimension of generated code (a `Communicator`) that writes its collectives down instead of sending."""

    name: str
    degree: int
    coordinate: int
    ledger: Ledger

    def __repr__(self) -> str:
        return f"<{self.name}: {self.degree} ranks>"

    def _note(self, kind: Collective, operand: torch.Tensor) -> None:
        size = operand.numel() * operand.element_size()
        self.ledger.add(self.name, kind, collective(kind, self.degree, size))

    def index(self) -> int:
        return self.coordinate

    def apply(self, x: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(self.coordinate, x)

    def all_reduce(self, x: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        self._note("all_reduce", x)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def start_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._note("all_gather", x)
        return x.new_empty((x.shape[0] * self.degree, *x.shape[1:]))

    def start_reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self._note("reduce_scatter", x)
        return x.new_empty((x.shape[0] // self.degree, *x.shape[1:]))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        self._note("all_to_all", x)
        return torch.empty_like(x)

    def exchange(self, x: torch.Tensor, to: int) -> torch.Tensor:
        self._note("exchange", x)
        return torch.empty_like(x)

    def start_shift(self, x: torch.Tensor) -> torch.Tensor:
        self._note("shift", x)
        return torch.empty_like(x)

    def all_to_all_rows(self, x: torch.Tensor, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """As many rows come as go: the expected number."""
        self._note("all_to_all", x)
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
