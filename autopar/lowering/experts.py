"""Sorted rows on the ranks of their experts: how they get there and back, and the products there.

A rank sorts the rows of its own tokens by expert (`autopar.rules.routed`). Two ways lead to the rows of its experts:

* every rank sends each row to the rank of its expert, and gets the product back (`rows_to_experts`, `rows_to_tokens`;
  Lepikhin et al. 2020, "GShard"). Ranks first tell each other how many rows they send (`route_to_experts`);
* every rank has all tokens, and takes the rows of its experts from the order of all (`part_of_experts`).

Ranks count on each other's rows, so a token must choose the same experts when its block is recomputed. Scores that are
computed again may differ in the last bit. Therefore a recomputed block keeps its choices (`KeptChoices`).
"""

from contextvars import ContextVar, Token
from typing import Any

import torch

from autopar._torch import private
from autopar.lowering.communicator import Communicator
from autopar.lowering.functions import Linear
from autopar.rules.routed import PRODUCT

COUNT_BYTES = 8  # of a number of rows
# rows to every rank, rows from every rank, both in host memory; the places of received rows in the order of experts;
# the experts of the sorted rows
Route = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class KeptChoices:
    """The experts that tokens chose in one call, for the calls that run it again: kept as autograd keeps tensors."""

    def __init__(self) -> None:
        self._pack, self._unpack = private.saved_tensor_hooks()
        self._kept: list[Any] = []
        self._is_known, self._place = False, 0
        self._outer: Token[KeptChoices | None] | None = None

    def __enter__(self) -> None:
        self._place, self._outer = 0, _CHOICES.set(self)

    def __exit__(self, *exception: Any) -> None:
        assert self._outer is not None
        _CHOICES.reset(self._outer)
        self._is_known = True

    def of(self, chosen: torch.Tensor) -> torch.Tensor:
        """The experts that the first run of the block chose at this place."""
        if not self._is_known:
            self._kept.append(self._pack(chosen))
            return chosen
        self._place += 1
        return self._unpack(self._kept[self._place - 1])


_CHOICES: ContextVar[KeptChoices | None] = ContextVar("choices of the block that runs", default=None)


def kept_choice(chosen: torch.Tensor) -> torch.Tensor:
    """The experts that tokens choose, the same in every run of a recomputed block."""
    choices = _CHOICES.get()
    return chosen if choices is None else choices.of(chosen)


def route_to_experts(order: torch.Tensor, chosen: torch.Tensor, count: int, mesh: Communicator) -> Route:
    """How the sorted rows of this rank's tokens go to the ranks of their experts, and which rows come from others."""
    numbers = chosen.reshape(-1).index_select(0, order)
    last = torch.arange(1, mesh.degree + 1, device=numbers.device, dtype=numbers.dtype) * (count // mesh.degree)
    ends = torch.searchsorted(numbers, last)
    sent = torch.diff(ends, prepend=ends.new_zeros(1))
    sent, received = mesh.to_host(torch.stack((sent, mesh.all_to_all(sent)))).unbind(0)
    arrived = mesh.all_to_all_rows(numbers, sent, received)
    numbers, places = torch.sort(arrived, stable=True)
    return sent, received, places, numbers


def _there(rows: torch.Tensor, mesh: Communicator, route: Route) -> torch.Tensor:
    """Rows of this rank's tokens to the ranks of their experts."""
    sent, received, places, _ = route
    return mesh.all_to_all_rows(rows.contiguous(), sent, received).index_select(0, places)


def _back(rows: torch.Tensor, mesh: Communicator, route: Route) -> torch.Tensor:
    """Rows of this rank's experts to the ranks that they came from."""
    sent, received, places, _ = route
    in_order_of_ranks = torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, places, rows)
    return mesh.all_to_all_rows(in_order_of_ranks, received, sent)


def rows_to_experts(rows: torch.Tensor, mesh: Communicator, route: Route) -> torch.Tensor:
    """The sorted rows of this rank's tokens to the sorted rows of its experts."""
    out: torch.Tensor = Linear.apply(rows, _there, _back, mesh, route)
    return out


def rows_to_tokens(rows: torch.Tensor, mesh: Communicator, route: Route) -> torch.Tensor:
    """The sorted rows of this rank's experts to the sorted rows of its tokens."""
    out: torch.Tensor = Linear.apply(rows, _back, _there, mesh, route)
    return out


def expert_numbers(route: Route) -> torch.Tensor:
    """The numbers of experts of the sorted rows of this rank's experts. The route has sent them already."""
    return route[3]


def part_of_experts(order: torch.Tensor, chosen: torch.Tensor, count: int, mesh: Communicator) -> torch.Tensor:
    """The part of an order of all rows that has the rows of this rank's experts."""
    numbers = chosen.reshape(-1).index_select(0, order)
    size = count // mesh.degree

    def part(coordinate: int, both: torch.Tensor) -> torch.Tensor:
        edges = torch.tensor([coordinate * size, (coordinate + 1) * size], dtype=both.dtype, device=both.device)
        begin, end = torch.searchsorted(both[1], edges).tolist()
        return both[0, begin:end]

    return mesh.rows_of_part(torch.stack((order, numbers.to(order.dtype))), part)


def product_of_experts(
    rows: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor, k: int, mesh: Communicator
) -> torch.Tensor:
    """The sorted rows of this rank's experts times their matrices (own experts, in, out)."""
    out: torch.Tensor = PRODUCT(rows, weight, expert - mesh.index() * weight.shape[0], k)
    return out
