"""Functions of ranks in test_loader: `Ranks.run("loader_ranks:name", ...)`."""

from collections.abc import Mapping
from multiprocessing import current_process, set_start_method
from typing import Any

import torch
import torch.distributed as dist
from data_models import VOCABULARY, rows, tokens
from data_ranks import LENGTH, made
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from autopar.errors import AutoparError
from autopar.runtime.data.order import SampleOrder
from autopar.runtime.data.parts import LoaderOptions, MapParts, Split

SAMPLES, GLOBAL_BATCH, EPOCHS, SEED, RATE = 11, 8, 3, 3, 0.5


class Rows:
    """A dataset of sequences. Each draws a label of its own, as an augmentation does."""

    def __init__(self, length: int = SAMPLES, *, fails_at: int | None = None) -> None:
        self.rows, self.length, self.fails_at = rows(SAMPLES, LENGTH, 5), length, fails_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.fails_at:
            raise OSError("a file cannot be read")
        sample = {name: value[index].clone() for name, value in self.rows.items()}
        sample["labels"][-1] = torch.randint(VOCABULARY, ())
        return sample


class RowStream(IterableDataset[Any]):
    """The same as an iterable."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.rows = Rows(length)

    def __iter__(self) -> Any:
        return (self.rows[index] for index in range(self.rows.length))


class StatefulRows(RowStream):
    """The same with a state, split over workers as torch's documentation has it."""

    def __init__(self, length: int = 3 * SAMPLES) -> None:
        super().__init__()
        self.length, self.place, self.begin = length, 0, 0

    def __iter__(self) -> Any:
        for number in range(self.begin, self.length):
            worker, self.place = get_worker_info(), number + 1
            if worker is None or number % worker.num_workers == worker.id:
                yield numbered(number)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "seen": torch.arange(self.place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["seen"].tolist() == list(range(state["place"]))
        self.begin = self.place = state["place"]


def numbered(number: int) -> dict[str, torch.Tensor]:
    """A sequence that no other number has."""
    digits = [number // VOCABULARY**place % VOCABULARY for place in range(LENGTH)]
    return {"input_ids": torch.tensor(digits), "labels": torch.tensor(digits)}


def may_start_workers() -> None:
    """Ranks of a test are daemons of a fork server: Python forbids them processes of their own, or starts slow ones."""
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    set_start_method("fork", force=True)


def on_one_device() -> list[float]:
    """The losses of all epochs, of the dataset in its order for these epochs."""
    model = tokens()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    found = []
    for epoch in range(EPOCHS):
        order = SampleOrder(length=SAMPLES, seed=SEED, epoch=epoch).at(range(SAMPLES)).tolist()
        split = Split(global_batch=SAMPLES, index=0, count=1, drop_last=False)
        options = LoaderOptions(collate_fn=lambda samples: samples, seed=SEED, shuffle=True)
        parts = MapParts(Rows(), options, split, epoch, 0)
        ((samples, _, _),) = parts.parts(0, 1)
        assert all(torch.equal(s["input_ids"], Rows()[i]["input_ids"]) for s, i in zip(samples, order, strict=True))
        for first in range(0, SAMPLES, GLOBAL_BATCH):
            some = samples[first : first + GLOBAL_BATCH]
            loss = model(**{name: torch.stack([s[name] for s in some]) for name in some[0]})["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def trained(rank: int, world_size: int, wish: Mapping[str, Any], folder: str, most: int, start: int) -> list[float]:
    """The losses of the next steps of a run, at most so many. It is saved after each in the folder of this start, and
    goes on from the folder of the start before, with one worker more."""
    parallel, _ = made(world_size, wish, GLOBAL_BATCH // wish.get("dp", 1))
    may_start_workers()
    loader = parallel.loader(Rows(), shuffle=True, seed=SEED, num_workers=start)
    optimizer = torch.optim.SGD([p for p in parallel.parameters() if p.requires_grad], RATE)
    if start:
        parallel.load(f"{folder}/{start - 1}", optimizer, {"loader": loader})
    found: list[float] = []
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            found.append(parallel.forward_backward(batch).item())
            optimizer.step()
            optimizer.zero_grad()
            parallel.save(f"{folder}/{start}", optimizer, {"loader": loader}, step=len(found), keep_last=2)
            if len(found) == most:
                dist.barrier()
                return found
    dist.barrier()
    return found


def stream_read(
    rank: int, world_size: int, wish: Mapping[str, Any], folder: str, most: int, start: int
) -> tuple[int, list[list[Any]]]:
    """The next batches of an epoch of a stream, at most so many, with saves and loads as in `trained`.

    Returns this rank's data-parallel coordinate, and the first tokens of the rows of each batch.
    """
    parallel, _ = made(world_size, wish, GLOBAL_BATCH // wish.get("dp", 1))
    may_start_workers()
    loader = parallel.loader(StatefulRows(), global_batch=4, num_workers=2 - start % 2)
    if start:
        parallel.load(f"{folder}/{start - 1}", extra={"loader": loader})
    found: list[list[Any]] = []
    for batch in loader:
        found.append(batch["input_ids"].tolist())
        is_odd = bool(len(found) % 2)
        parallel.save(f"{folder}/{start}", extra={"loader": loader}, step=len(found), asynchronous=is_odd)
        if len(found) == most:
            break
    parallel.finish_saving()
    return parallel.rank_mesh.sample_ranks.coordinate, found


def parts_read(rank: int, world_size: int, wish: Mapping[str, Any], kind: str, workers: int) -> tuple[int, list[Any]]:
    """This rank's data-parallel coordinate, and the batches of its loader."""
    parallel, _ = made(world_size, wish, 2)
    may_start_workers()
    source = Rows() if kind == "by index" else RowStream()
    loader = parallel.loader(source, global_batch=4, num_workers=workers)
    found = [{name: value.tolist() for name, value in batch.items()} for batch in loader]
    return parallel.rank_mesh.sample_ranks.coordinate, found


def refusals(rank: int, world_size: int, wish: Mapping[str, Any]) -> dict[str, str]:
    """The messages of loaders that some or all ranks cannot use."""
    parallel, _ = made(world_size, wish, 2)
    odd = rank == 1
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "lengths": (Rows(10 if odd else 11), {}),
        "seeds": (Rows(), {"seed": int(odd)}),
        "an option": (Rows(), {"num_workers": -1 if odd else 0}),
        "options": (RowStream(), {"global_batch": 3, "shuffle": True, "seed": -1}),
        "a generator": ((sample for sample in [1, 2]), {}),
        "nothing": ([], {}),
        "a loader": (DataLoader(Rows()), {}),
        "a file": (Rows(fails_at=6 if rank >= world_size - parallel.plan.degrees.tp else None), {}),
        "a shorter stream": (RowStream(5 if odd else 11), {"global_batch": 2}),
    }
    found = {}
    for name, (source, options) in cases.items():
        try:
            seen = sum(1 for _ in parallel.loader(source, **options))
            found[name] = f"{seen} batches"
        except (AutoparError, OSError) as error:
            found[name] = str(error)
    return found


def not_maskable(rank: int, world_size: int, wish: Mapping[str, Any]) -> dict[str, str]:
    """A model without targets to ignore: which epochs can end."""
    parallel, _ = made(world_size, wish, 4, masked=False)
    found = {}
    for length in (8, 9, 10, 12):
        try:
            found[str(length)] = f"{len(parallel.loader(Rows(length)))} batches"
        except AutoparError as error:
            found[str(length)] = str(error)
    found["dropped"] = f"{len(parallel.loader(Rows(9), drop_last=True))} batches"
    return found
