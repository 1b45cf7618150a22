"""Loaders on ranks: runs that go on under another plan, equal data on replicas, and one error for all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import loader_ranks
import pytest
from suites import long

from autopar.runtime.distributed.launch import Ranks

World = Callable[[int], Ranks]
WISH: dict[str, Any] = {"tp": 2, "dp": 2, "zero": 3}
STARTS = (
    (4, WISH, 3),
    (2, {"tp": 2, "accumulate": 2}, 1),
    (4, {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 2}, 2),
)


@pytest.mark.parametrize("starts", [STARTS, long((STARTS[2], STARTS[1])), long((STARTS[1], STARTS[0]))], ids=len)
def test_losses_of_a_run_under_several_plans_are_those_of_one_device(
    starts: Any, worlds: World, tmp_path: Path
) -> None:
    """Three epochs with a short last batch. Starts end inside an epoch and at its end; the last one has no end."""
    expected = loader_ranks.on_one_device()
    found: list[float] = []
    for number, (size, wish, most) in enumerate(starts):
        most = len(expected) if number == len(starts) - 1 else most
        every = worlds(size).run("loader_ranks:trained", size, wish, str(tmp_path), most, number)
        assert all(rank == every[0] for rank in every)
        found += every[0]
    assert found == pytest.approx(expected, abs=1e-9)


STREAM_STARTS = ((2, {"dp": 2, "zero": 3}, 3), (4, {"dp": 4, "zero": 1}, 2), (1, {"dp": 1}, 100))


def test_a_stream_goes_on_from_a_checkpoint_with_other_ranks_and_workers(worlds: World, tmp_path: Path) -> None:
    """2, 4 and 1 ranks with workers, in one epoch: every sample once and in order, also from asynchronous saves."""
    found: list[list[Any]] = []
    for start, (size, wish, most) in enumerate(STREAM_STARTS):
        every = worlds(size).run("loader_ranks:stream_read", size, wish, str(tmp_path), most, start)
        assert [dp for dp, _ in every] == list(range(size))
        found += [[row for part in parts for row in part] for parts in zip(*(b for _, b in every), strict=True)]
    expected = [loader_ranks.numbered(number)["input_ids"].tolist() for number in range(3 * loader_ranks.SAMPLES)]
    assert [row for batch in found for row in batch] == expected
    assert [len(batch) for batch in found] == [4] * 8 + [1]


@pytest.mark.parametrize(("kind", "workers"), [("by index", 0), ("by index", 2), ("stream", 0), long("stream", 2)])
def test_replicas_read_equal_data(kind: str, workers: int, four_ranks: Ranks) -> None:
    """Also what samples draw; the data-parallel ranks together read every sample once."""
    every = four_ranks.run("loader_ranks:parts_read", 4, WISH, kind, workers)
    assert sorted(dp for dp, _ in every) == [0, 0, 1, 1]
    of_dp = {dp: [batches for at, batches in every if at == dp] for dp in (0, 1)}
    assert all(first == second for first, second in of_dp.values())
    read = [tuple(ids) for dp in (0, 1) for batch in of_dp[dp][0] for ids in batch["input_ids"]]
    samples = [tuple(ids) for ids in loader_ranks.Rows().rows["input_ids"].tolist()]
    assert sorted(read) == sorted(samples)


def test_every_refusal_is_one_error_on_all_ranks(four_ranks: Ranks) -> None:
    found = four_ranks.run("loader_ranks:refusals", 4, WISH)
    expected = {
        "lengths": "rank 1 read other data than ranks 0, 2, 3; here epoch 0, offset 0, length",
        "seeds": "rank 1 read other data than ranks 0, 2, 3",
        "options": "global_batch: must be a whole number above 0 that the 2 data-parallel ranks divide; got 3",
        "a generator": "is an iterator, which can be read only once",
        "nothing": "dataset: has no samples",
        "a loader": "dataset: must be a dataset, not a loader; pass loader.dataset",
        "a shorter stream": "rank 1 ran out of data after 3 batches, ranks 0, 2, 3 did not",
    }
    for name, text in expected.items():
        assert [text in rank[name] for rank in found] == [True] * 4, found[0][name]
    assert "shuffle: cannot be true" in found[0]["options"] and "seed: must be" in found[0]["options"]
    assert "num_workers: must be a whole number" in found[1]["an option"]
    assert "the data cannot be read on rank 1; the error of that rank says why" in found[0]["an option"]
    assert "a file cannot be read" in found[3]["a file"]
    assert "failing" in found[0]["a file"] and "reading data" in found[0]["a file"]


def test_an_epoch_that_could_not_end_is_refused_before_its_first_step(four_ranks: Ranks) -> None:
    for found in four_ranks.run("loader_ranks:not_maskable", 4, WISH):
        assert (found["8"], found["dropped"]) == ("1 batches", "1 batches")
        assert (found["10"], found["12"]) == ("2 batches", "2 batches")  # as many on every rank: captured again
        assert "a batch of 1, a full one has 8" in found["9"] and "pass drop_last=True" in found["9"]
