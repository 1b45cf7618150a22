"""Datasets, and loaders of all data-parallel ranks in this process."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from autopar.runtime.data.loader import LoaderOptions, ParallelLoader
from autopar.runtime.data.parts import Split


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """A dataset whose samples are their own numbers, each with a random number that it draws."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(index), "drawn": torch.rand(2)}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same without a length and without a state. `read` counts the samples that were read in this process."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.read = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from self.samples_from(0)

    def samples_from(self, first: int) -> Iterator[dict[str, torch.Tensor]]:
        """The order of an epoch begins at another sample."""
        for place in range(first, self.length):
            self.read += 1
            number = torch.tensor((place + 3 * self.epoch) % self.length)
            yield {"number": number, "drawn": torch.tensor([np.random.random()])}


class StatefulStream(Stream):
    """The same with a state."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.place, self.begin = 0, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.place = self.begin
        for sample in self.samples_from(self.begin):
            self.place += 1
            yield sample

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.begin = state["place"]


class Job:
    """The loaders of all data-parallel ranks, which read in step."""

    def __init__(self, source: Callable[[], Any], dp: int, global_batch: int, **options: Any) -> None:
        drop_last = options.pop("drop_last", False)
        self.loaders = [
            ParallelLoader(
                source(),
                Split(global_batch=global_batch, index=index, count=dp, drop_last=drop_last),
                LoaderOptions(**options),
                agree=lambda values: None,
                lockstep=iter,
                short=lambda size: "",
            )
            for index in range(dp)
        ]

    @property
    def epoch(self) -> int:
        (epoch,) = {loader.epoch for loader in self.loaders}
        return epoch

    def batches(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        """For each global batch of the rest of the epoch the parts of all ranks."""
        for parts in zip(*self.loaders, strict=True):
            yield list(parts)

    def state(self) -> Any:
        """The position, which is the same on all ranks, through a file."""
        (text,) = {json.dumps(loader.state_dict()) for loader in self.loaders}
        return json.loads(text)

    def load(self, state: Any) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)


def joined(parts: list[dict[str, torch.Tensor]], name: str = "number") -> list[Any]:
    """The rows of a global batch."""
    return torch.cat([part[name] for part in parts]).tolist()
