"""Every sample once in an epoch, whatever ends a run and under whatever plan it goes on."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import Job, Numbers, StatefulStream, Stream, joined

from autopar.errors import RuntimeInputError
from autopar.runtime.data.loader import LoaderOptions, ParallelLoader
from autopar.runtime.data.order import SampleOrder
from autopar.runtime.data.parts import Split

EPOCHS = 3
KINDS: dict[str, Callable[[int], Any]] = {
    "by index": lambda length: Numbers(length=length),
    "stream": Stream,
    "stream with a state": StatefulStream,
}


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int]]]:
    """A length, a global batch, and the starts of a run: data-parallel ranks, workers' place, batches until its end."""
    dps = st.sampled_from((1, 2, 3, 4, 6))
    global_batch = 12 * draw(st.integers(1, 2))
    starts = st.tuples(dps, st.just(global_batch), st.integers(0, 7))
    return draw(st.integers(1, 61)), global_batch, draw(st.lists(starts, max_size=4))


def train(
    source: Callable[[], Any], starts: list[tuple[int, int, int]], last: tuple[int, int], **options: Any
) -> list[tuple[int, list[int]]]:
    """The (epoch, global batch) of all steps of a run that is killed after some batches of each start but the last.

    Each start has (data-parallel ranks, global batch, batches). What it reads after its save is lost with it.
    """
    found: list[tuple[int, list[int]]] = []
    state = None
    for dp, global_batch, most in [*starts, (*last, 10**6)]:
        job = Job(source, dp, global_batch, **options)
        if state is not None:
            job.load(state)
        state, left = job.state(), most
        for epoch in range(job.epoch, EPOCHS):
            assert job.epoch == epoch
            for parts in job.batches():
                if not left:
                    break
                found.append((epoch, joined(parts)))
                state, left = job.state(), left - 1
            else:
                continue
            break
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(run=runs(), shuffle=st.booleans(), seed=st.integers(0, 2**62))
def test_killed_and_planned_again(kind: str, run: Any, shuffle: bool, seed: int) -> None:
    """The global batches are those of an unbroken run on one device."""
    length, global_batch, starts = run
    options = {"seed": seed, "shuffle": shuffle and kind == "by index"}
    unbroken = train(lambda: KINDS[kind](length), [], (1, global_batch), **options)
    assert train(lambda: KINDS[kind](length), starts, (2, global_batch), **options) == unbroken
    for epoch in range(EPOCHS):
        seen = [sample for at, batch in unbroken if at == epoch for sample in batch]
        assert sorted(seen) == list(range(length))
    if kind == "by index":
        order = SampleOrder(length=length, seed=seed, epoch=1, shuffle=options["shuffle"]).at(range(length)).tolist()
        assert [sample for at, batch in unbroken if at == 1 for sample in batch] == order


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(
    length=st.integers(1, 61),
    starts=st.lists(st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((4, 8, 12)), st.integers(0, 5)), max_size=4),
    last=st.tuples(st.sampled_from((1, 3)), st.sampled_from((3, 6, 15))),
)
def test_other_global_batches(kind: str, length: int, starts: Any, last: tuple[int, int]) -> None:
    """A plan with another global batch goes on at the same sample: the order of samples is that of one device."""
    options = {"shuffle": kind == "by index"}
    whole = train(lambda: KINDS[kind](length), [], (1, 5), **options)
    found = train(lambda: KINDS[kind](length), starts, last, **options)
    for epoch in range(EPOCHS):
        seen, expected = ([s for at, batch in one if at == epoch for s in batch] for one in (found, whole))
        assert seen == expected and sorted(seen) == list(range(length))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(kind: str, workers: int) -> None:
    """Neither batches, nor what samples draw, nor the position: batches that workers hold in advance do not count."""
    options = {"shuffle": kind == "by index", "seed": 5}
    alone, helped = (Job(lambda: KINDS[kind](29), 2, 4, num_workers=n, **options) for n in (0, workers))
    state = None
    for number, (one, other) in enumerate(zip(alone.batches(), helped.batches(), strict=True)):
        assert joined(one) == joined(other)
        assert joined(one, "drawn") == joined(other, "drawn")
        assert alone.state() == helped.state()
        if number == 2:
            state = helped.state()
            assert state["offset"] == 12
    assert state is not None and alone.epoch == helped.epoch == 1
    resumed = Job(lambda: KINDS[kind](29), 1, 4, num_workers=workers, **options)
    resumed.load(state)
    again = Job(lambda: KINDS[kind](29), 4, 4, **options)
    again.load(state)
    found = [(joined(one), joined(other)) for one, other in zip(resumed.batches(), again.batches(), strict=True)]
    assert all(one == other for one, other in found)
    assert [len(one) for one, _ in found] == [4, 4, 4, 4, 1]


@settings(max_examples=30)
@given(length=st.integers(1, 40), dp=st.sampled_from((1, 2, 4)), done=st.integers(0, 4))
def test_random_numbers_are_of_the_sample(length: int, dp: int, done: int) -> None:
    """A sample draws the same numbers under every plan, and the loop around it draws its own."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = torch.rand(2).tolist(), np.random.random(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    drawn: list[dict[int, list[float]]] = []
    for ranks, size in ((1, 8), (dp, 12)):
        job = Job(lambda: Numbers(length=length), ranks, size, shuffle=True)
        drawn.append({})
        for parts in job.batches():
            drawn[-1] |= dict(zip(joined(parts), joined(parts, "drawn"), strict=True))
    assert drawn[0] == drawn[1]
    assert len({tuple(values) for values in drawn[0].values()}) == length
    assert expected == (torch.rand(2).tolist(), np.random.random(), random.random())


def test_epochs_draw_other_numbers() -> None:
    job = Job(lambda: Numbers(length=4), 1, 4)
    first, second = (joined(parts, "drawn") for _ in range(2) for parts in job.batches())
    assert first != second


@pytest.mark.parametrize("kind", KINDS)
def test_drop_last_leaves_out_a_short_batch(kind: str) -> None:
    job = Job(lambda: KINDS[kind](11), 2, 4, drop_last=True)
    assert [len(joined(parts)) for parts in job.batches()] == [4, 4]
    assert job.state()["epoch"] == 1 and job.state()["offset"] == 0
    if kind == "by index":
        assert {len(loader) for loader in job.loaders} == {2}
    else:
        with pytest.raises(TypeError, match="no length"):
            len(job.loaders[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_samples_has_a_batch_without_rows(kind: str) -> None:
    """Its other dimensions and its dtypes are those of a batch."""
    job = Job(lambda: KINDS[kind](5), 4, 4)
    *_, last = job.batches()
    assert sorted(len(part["number"]) for part in last) == [0, 0, 0, 1]
    (whole,) = (part for part in last if len(part["number"]))
    for part in last:
        assert part["drawn"].shape[1:] == whole["drawn"].shape[1:]
        assert part["drawn"].dtype == whole["drawn"].dtype


def test_the_dimension_of_samples_is_found() -> None:
    """The second dimension, and an input that all samples share."""

    def collate(samples: list[Any]) -> Any:
        return {"x": torch.stack([s["drawn"] for s in samples], 1), "mask": torch.ones(1, 3)}

    job = Job(lambda: Numbers(length=1), 2, 2, collate_fn=collate)
    ((first, second),) = job.batches()
    assert [part["x"].shape for part in (first, second)] == [(2, 0), (2, 1)]
    assert [part["mask"].shape for part in (first, second)] == [(1, 3), (1, 3)]


def test_a_batch_without_rows_that_nobody_can_make() -> None:
    job = Job(lambda: Numbers(length=1), 2, 2, collate_fn=lambda samples: [int(s["number"]) for s in samples])
    with pytest.raises(RuntimeInputError, match="pass drop_last=True"):
        list(job.batches())


def test_a_state_spares_reading_again() -> None:
    """A dataset with a state begins at it. Another is read from its beginning."""
    for kind, expected in ((Stream, 20), (StatefulStream, 12)):
        first = Job(lambda kind=kind: kind(20), 1, 4)
        for number, _ in enumerate(first.batches()):
            if number == 1:
                break
        second = Job(lambda kind=kind: kind(20), 1, 4)
        second.load(first.state())
        assert [len(joined(parts)) for parts in second.batches()] == [4, 4, 4]
        assert second.loaders[0]._source.read == expected


def test_several_samples_are_read_at_once() -> None:
    class Several(Numbers):
        calls = 0

        def __getitems__(self, indices: list[int]) -> list[Any]:
            Several.calls += 1
            return [self[index] for index in indices]

    job = Job(lambda: Several(length=8), 2, 4)
    assert [joined(parts) for parts in job.batches()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Several.calls == 4


def test_a_loop_that_was_left_goes_on() -> None:
    job = Job(lambda: Numbers(length=12), 1, 4)
    (loader,) = job.loaders
    for part in loader:
        assert part["number"].tolist() == [0, 1, 2, 3]
        break
    left = iter(loader)
    assert next(left)["number"].tolist() == [4, 5, 6, 7]
    assert [part["number"].tolist() for part in loader] == [[8, 9, 10, 11]]
    with pytest.raises(RuntimeInputError, match="another loop over this loader began"):
        next(left)
    assert loader.epoch == 1


def saved(**changes: Any) -> dict[str, Any]:
    state: dict[str, Any] = Job(lambda: Numbers(length=12), 2, 4, seed=3).state()
    return state | changes


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (saved(seed=4), ["seed: was 4 when the position was saved, and is 3 here", "pass the saved seed"]),
        (saved(length=13, shuffle=True), ["length: was 13", "is 12 here", "shuffle: was True"]),
        (saved(offset=13), ["offset: must be at most 12"]),
        (saved(offset=-1), ["offset: must be a whole number of at least 0"]),
        (saved(epoch=True), ["epoch: must be a whole number"]),
        (saved(version=2), ["version: must be 1"]),
        (saved(stream={"place": 1}), ["this dataset has none"]),
        (saved(ofset=1), ["ofset: is not a known key; did you mean 'offset'?"]),
        ({"epoch": 1}, ["offset: is required", "seed: is required"]),
    ],
)
def test_positions_that_do_not_fit(state: dict[str, Any], says: list[str]) -> None:
    job = Job(lambda: Numbers(length=12), 2, 4, seed=3)
    with pytest.raises(RuntimeInputError) as caught:
        job.load(state)
    for text in says:
        assert text in str(caught.value)
    assert job.state() == saved()


def test_a_stream_that_is_shorter_than_the_position() -> None:
    long, short = Job(lambda: Stream(12), 1, 4), Job(lambda: Stream(3), 1, 4)
    next(long.batches())
    short.load(long.state())
    with pytest.raises(RuntimeInputError, match="ended after 3 samples, before the saved position 4"):
        next(short.batches())


def test_an_epoch_that_could_not_end() -> None:
    """The last batch is looked at before the first."""

    def made(length: int, *, drop_last: bool = False) -> ParallelLoader:
        split = Split(global_batch=4, index=0, count=2, drop_last=drop_last)
        return ParallelLoader(
            Numbers(length=length),
            split,
            LoaderOptions(),
            agree=lambda values: None,
            lockstep=iter,
            short=lambda size: "" if size == 2 else "a reason",
        )

    assert len(made(10)) == 3 and len(made(11, drop_last=True)) == 2
    with pytest.raises(RuntimeInputError, match="a batch of 3, a full one has 4, and a reason; pass drop_last=True"):
        made(11)
    with pytest.raises(RuntimeInputError, match="drop_last leaves no batch of 3 samples"):
        made(3, drop_last=True)
