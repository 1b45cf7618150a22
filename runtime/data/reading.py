"""Parts as the training loop gets them, read here or ahead by workers.

torchdata's `StatefulDataLoader` reads a dataset with a state, if torchdata is installed. Its workers report the state
of the dataset with every part, and the loader gives the state at the part that the loop has got. This state is of one
number of workers and ranks. The worker that is furthest holds the dataset's own state, which fits every plan.
Positions are equal with torch's `DataLoader`, to which the parts bring this state themselves.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autopar.runtime.data.order import undisturbed
from autopar.runtime.data.parts import Parts, RankPart, StreamParts, is_stateful

_POSITION = "autopar position"


def read_parts(parts: Parts) -> Iterator[RankPart]:
    """The parts of a rank, read as their options say. The loop around them draws the same random numbers as without."""
    wanted = parts.options
    options: dict[str, Any] = {
        "batch_size": None,
        "collate_fn": _as_it_is,
        "generator": torch.Generator(),  # else torch draws a number of the training loop's
        "num_workers": wanted.num_workers,
        "prefetch_factor": wanted.prefetch_factor,
        "pin_memory": wanted.pin_memory,
    }
    items = _reported(parts, options) if isinstance(parts, StreamParts) and is_stateful(parts.source) else None
    if items is None:
        items = iter(DataLoader(parts, **options))
    return items if wanted.num_workers else undisturbed(items)


def _reported(parts: StreamParts, options: Mapping[str, Any]) -> Iterator[RankPart] | None:
    """The parts through torchdata, with the positions that its loader gives. None without torchdata."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return None
    return _with_positions(StatefulDataLoader(_PlainParts(parts), snapshot_every_n_steps=1, **options))


def _with_positions(loader: Any) -> Iterator[RankPart]:
    for batch, place in loader:
        position, state = max(_positions(loader.state_dict()), key=lambda position: position[0])
        assert position == place, f"torchdata gives the position {position} for a part that ends at {place}"
        yield batch, place, state


def _positions(state: Any) -> Iterator[tuple[int, Any]]:
    """Every position in the state of torchdata's loader, which has one for each worker at places of its own."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key == _POSITION:
                yield value
            else:
                yield from _positions(value)


class _PlainParts(IterableDataset[tuple[Any, int]]):
    """Parts without their states, which the iterator gives when it is asked."""

    def __init__(self, parts: StreamParts) -> None:
        self._parts = parts

    def __iter__(self) -> "_ReportedIterator":
        return _ReportedIterator(self._parts)


class _ReportedIterator(Iterator[tuple[Any, int]]):
    """torchdata's `Stateful` iterator. A position is a tuple: of dicts torchdata sends changed entries only."""

    _position: tuple[int, Any]
    _items: Iterator[RankPart]

    def __init__(self, parts: StreamParts) -> None:
        self._parts = parts
        self.load_state_dict({_POSITION: (parts.offset, parts.state)})

    def __next__(self) -> tuple[Any, int]:
        batch, place, state = next(self._items)
        self._position = place, state
        return batch, place

    def state_dict(self) -> dict[str, Any]:
        return {_POSITION: self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position = place, held = state[_POSITION]
        self._items = iter(replace(self._parts, offset=place, state=held))


def _as_it_is(item: Any) -> Any:
    return item
