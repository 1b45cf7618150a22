"""One rank's parts of the global batches of an epoch, as a process that reads data makes them.

A global batch is a run of consecutive places in the order of samples. The rank's process and each of its workers know
all of them. Worker w of W makes every W-th part, so the parts do not depend on the number of workers. An iterable is
read as if there were no workers: many split themselves over workers, and each worker reads them whole here.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from autopar._torch import private
from autopar.errors import RuntimeInputError
from autopar.runtime.data.order import SampleOrder, number_of, seed_draws

Collate = Callable[[list[Any]], Any]
RankPart = tuple[Any, int, Any]  # this rank's batch, the place after the global batch, the dataset's state there


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How global batches of `global_batch` samples are cut. Rank `index` of `count` reads its part of each."""

    global_batch: int
    index: int
    count: int
    drop_last: bool

    def sizes(self, samples: int) -> Iterator[int]:
        """The samples of each global batch, of a number of samples that are left."""
        while samples >= self.global_batch or (samples and not self.drop_last):
            size = min(samples, self.global_batch)
            yield size
            samples -= size

    def even_rows(self, size: int) -> range:
        """This rank's rows in a global batch of known size: ranks have equally many, or one more than others."""
        return range(self.index * size // self.count, (self.index + 1) * size // self.count)

    def counts(self, size: int) -> list[int]:
        """The number of rows that each rank has in a global batch of known size."""
        return [len(replace(self, index=index).even_rows(size)) for index in range(self.count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How a dataset is read; `autopar.runtime.model.module.ParallelModel.loader` describes the fields."""

    shuffle: bool = False
    seed: int = 0
    collate_fn: Collate = default_collate
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False


@dataclass(frozen=True)
class Parts(IterableDataset[RankPart]):
    """The parts of one rank from place `offset` of an epoch on."""

    source: Any
    options: LoaderOptions
    split: Split
    epoch: int
    offset: int

    def __iter__(self) -> Iterator[RankPart]:
        worker = get_worker_info()
        return self.parts(*(0, 1) if worker is None else (worker.id, worker.num_workers))

    def number(self, index: int, use: int) -> int:
        """What seeds the random numbers of a sample, or of its batch."""
        return number_of(self.options.seed, self.epoch, index, use)

    def batch(self, samples: Sequence[Any], number: int, *, is_empty: bool) -> Any:
        """A batch of samples; if `is_empty`, one sample's batch without its row. `number` seeds the random numbers."""
        seed_draws(number)
        collate = self.options.collate_fn
        batch = collate(list(samples))
        if not is_empty:
            return batch
        leaves, spec = private.pytree.tree_flatten(batch)
        twice, same_spec = private.pytree.tree_flatten(collate([*samples, *samples]))
        if spec != same_spec:
            raise RuntimeInputError(
                "this rank has no sample of the last batch, and collate_fn makes no batch without rows: a batch of two "
                "samples has another structure than one of one; return tensors, or pass drop_last=True"
            )
        return private.pytree.tree_unflatten([_without_rows(*pair) for pair in zip(leaves, twice, strict=True)], spec)

    @abstractmethod
    def parts(self, worker: int, num_workers: int) -> Iterator[RankPart]:
        """The parts that one worker makes."""


class MapParts(Parts):
    """Of a dataset with a length and an index. Each sample draws random numbers of its own."""

    def parts(self, worker: int, num_workers: int) -> Iterator[RankPart]:
        length = len(self.source)
        order = SampleOrder(length=length, seed=self.options.seed, epoch=self.epoch, shuffle=self.options.shuffle)
        first = self.offset
        for number, size in enumerate(self.split.sizes(length - self.offset)):
            if number % num_workers == worker:
                rows = self.split.even_rows(size)
                indices: list[int] = order.at(range(first + rows.start, first + rows.stop) or [first]).tolist()
                batch = self.batch(self._samples(indices), self.number(indices[0], 1), is_empty=not rows)
                yield batch, first + size, None
            first += size

    def _samples(self, indices: list[int]) -> list[Any]:
        if hasattr(self.source, "__getitems__"):  # torch's protocol of datasets that read several samples at once
            seed_draws(self.number(indices[0], 0))
            return list(self.source.__getitems__(indices))
        samples = []
        for index in indices:
            seed_draws(self.number(index, 0))
            samples.append(self.source[index])
        return samples


@dataclass(frozen=True)
class StreamParts(Parts):
    """Of an iterable, which every process reads whole, and keeps its own rows."""

    state: Any = None

    def parts(self, worker: int, num_workers: int) -> Iterator[RankPart]:
        split, first = self.split, self.offset
        rows = split.even_rows(split.global_batch)  # the batch may end before them
        with private.outside_of_workers():
            stream = self._at_offset()
        number = 0
        while True:
            seed_draws(self.number(first, 0))
            is_own = number % num_workers == worker
            with private.outside_of_workers():
                size, kept = _taken(stream, split.global_batch, rows if is_own else range(0))
            if not size or (size < split.global_batch and split.drop_last):
                return
            if is_own:
                is_empty = size <= rows.start
                yield self.batch(kept, self.number(first, 1), is_empty=is_empty), first + size, state_of(self.source)
            if size < split.global_batch:
                return
            first, number = first + size, number + 1

    def _at_offset(self) -> Iterator[Any]:
        """The stream behind the samples before `offset`."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.epoch)
        if self.state is not None:
            self.source.load_state_dict(copy.deepcopy(self.state))
            resumed: Iterator[Any] = iter(self.source)
            return resumed
        seed_draws(self.number(0, 0))
        stream: Iterator[Any] = iter(self.source)
        skipped = sum(1 for _ in islice(stream, self.offset))
        if skipped < self.offset:
            raise RuntimeInputError(
                f"the dataset ended after {skipped} samples, before the saved position {self.offset}; pass the dataset "
                "of the saved run"
            )
        return stream


def _taken(stream: Iterator[Any], most: int, rows: range) -> tuple[int, list[Any]]:
    """The size of the next global batch and some rows of it. If it ends before them, its first sample."""
    size, kept, first = 0, list[Any](), list[Any]()
    for row, sample in enumerate(islice(stream, most)):
        size = row + 1
        if row in rows:
            kept.append(sample)
        elif row == 0:
            first = [sample]
    return size, kept or first


def state_of(source: Any) -> Any:
    """The state of a dataset that has one, as plain data of its own."""
    has_state = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
    return copy.deepcopy(source.state_dict()) if has_state else None


def _without_rows(value: Any, two: Any) -> Any:
    """A leaf of a batch of one sample, without its row. The dimension of samples is longer in a batch of two."""
    if not isinstance(value, torch.Tensor) or value.shape == two.shape:
        return value
    dim = next(d for d, (a, b) in enumerate(zip(value.shape, two.shape, strict=True)) if a != b)
    return value.narrow(dim, 0, 0)
