"""Positions through workers: those of a dataset that one process reads."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from reading import Job, StatefulStream, Stream, joined
from suites import long
from torch.utils.data import get_worker_info

LENGTH, GLOBAL_BATCH = 41, 4


class ListedStream(StatefulStream):
    """A state with entries that change in place, in order and in type, in a dict without entries at first."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.seen: list[int] = []
        self.held: dict[str, Any] = {}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for sample in super().__iter__():
            self.seen.append(int(sample["number"]))
            self.held = {f"shard {self.place % 3}": 0, "a": self.place % 2, "b": (self.place % 2) == 1, **self.held}
            self.held["a"], self.held["b"] = self.held["b"], self.held["a"]
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "seen": self.seen, "held": self.held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.seen, self.held = state["seen"], state["held"]


class SplitOverWorkers(Stream):
    """An iterable as torch's documentation writes it: each worker reads samples of its own."""

    def samples_from(self, first: int) -> Iterator[dict[str, torch.Tensor]]:
        for place, sample in enumerate(super().samples_from(first)):
            worker = get_worker_info()
            if worker is None or place % worker.num_workers == worker.id:
                yield sample


class SplitWithState(StatefulStream, SplitOverWorkers):
    """The same with a state."""


KINDS: list[type[Stream]] = [Stream, StatefulStream, ListedStream, SplitOverWorkers, SplitWithState]


def read(starts: list[tuple[int, int, int]], source: Callable[[], Any]) -> tuple[list[list[int]], list[Any]]:
    """The global batches of one epoch, and the position after each. A start is (ranks, workers, batches)."""
    found: list[list[int]] = []
    positions: list[Any] = []
    for dp, workers, most in starts:
        job = Job(source, dp, GLOBAL_BATCH, num_workers=workers)
        if positions:
            job.load(positions[-1])
        for number, parts in enumerate(job.batches(), 1):
            found.append(joined(parts))
            positions.append(job.state())
            if number == most:
                break
    return found, positions


@pytest.mark.parametrize("kind", KINDS)
def test_restarts_in_an_epoch_with_other_ranks_and_workers(kind: type[Stream]) -> None:
    """2, 4 and 1 ranks: batches and positions are those of one process, and every sample is read once."""
    expected = read([(1, 0, 100)], lambda: kind(LENGTH))
    found = read([(2, 2, 3), (4, 1, 4), (1, 3, 100)], lambda: kind(LENGTH))
    assert found == expected
    assert sorted(number for batch in found[0] for number in batch) == list(range(LENGTH))
    texts = [repr(position) for position in expected[1]]
    assert [repr(position) for position in found[1]] == texts  # the order of keys, and True is not 1


def test_the_loop_keeps_its_random_numbers() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3).tolist()
    for workers in (0, 1):
        torch.manual_seed(4)
        job = Job(lambda: StatefulStream(20), 1, GLOBAL_BATCH, num_workers=workers)
        found = [torch.rand(()).item() for _, _ in zip(range(3), job.batches(), strict=False)]
        assert found == expected


@pytest.mark.parametrize("workers", [0, long(2)])  # torch waits 5 s for a worker whose dataset has failed
def test_an_error_of_the_dataset_is_raised(workers: int) -> None:
    class Failing(StatefulStream):
        def samples_from(self, first: int) -> Iterator[dict[str, torch.Tensor]]:
            for sample in super().samples_from(first):
                if sample["number"] == 9:
                    raise OSError("a shard cannot be read")
                yield sample

    job = Job(lambda: Failing(LENGTH), 1, GLOBAL_BATCH, num_workers=workers)
    with pytest.raises(OSError, match="a shard cannot be read"):
        list(job.batches())
    assert job.state()["offset"] == 8
