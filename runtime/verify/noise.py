"""Measured noise: runs on one device in which only rounding is different.

A run changes every parameter, every floating buffer and the fractions in inputs by at most their last bits:
x · (1 + ε · u) with u of -1, 0 or 1 and the machine epsilon ε of the run's dtype. Some runs also permute the samples of
each micro-batch, so that sums over the batch round differently. What a tensor moves by is its noise.

Rounding may carry a value over a step of a function, such as the zero of ReLU. Then gradients jump. A last bit may be
too little to show this, so the change doubles with every second run.

A model may use the position of a sample in the batch. A permutation then changes more than rounding. The loss and
outputs show this, and no further run permutes samples.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import isfinite
from typing import TypeVar

import torch

from autopar.ir.precision import like_kind
from autopar.ir.program import Program
from autopar.runtime.codegen.randomness import seed_from
from autopar.runtime.verify.error_metrics import distance, error
from autopar.runtime.verify.reference import Batch, Source, Steps

_T = TypeVar("_T")
MAX_RUNS = 8
_ROUNDING = 1e3  # a permutation that moves loss or outputs by more than this × (noise and epsilon) is no rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One run's change: the seed of the last bits, their size in epsilons, and whether samples are permuted."""

    seed: int
    epsilons: int = 1
    permutes: bool = False

    def of(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A value with random last bits. Integers stay as they are."""
        if value.is_complex():
            return torch.view_as_complex(self.of(name, torch.view_as_real(value.detach().resolve_conj())))
        if not value.is_floating_point():
            return value
        signs = torch.randint(-1, 2, value.shape, generator=self._generator(name)).to(value.dtype)
        return (value.detach() * (1 + torch.finfo(value.dtype).eps * self.epsilons * signs)).to(value.dtype)

    def input(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """An input with random last bits. Whole numbers stay: they may be indices, masks, or targets of 0 and 1."""
        moved = self.of(name, value)
        return torch.where(value == value.round(), value, moved) if value.is_floating_point() else moved

    def source(self, source: Source, dtype: torch.dtype | None = None) -> Source:
        """A source of changed values. Floating values are converted to `dtype` first, if one is given."""

        def get(name: str) -> torch.Tensor:
            value = source(name)
            return self.of(name, value if dtype is None else value.to(like_kind(value.dtype, dtype)))

        return get

    def batch(self, program: Program, batch: Batch, num_micro_batches: int) -> dict[str, torch.Tensor]:
        """A global batch with changed values, and with permuted samples in each micro-batch."""
        moved = {name: self.input(name, value) for name, value in batch.items()}
        dims = {info.name: info.batch_dim for info in program.inputs if info.batch_dim is not None}
        if not self.permutes or len({moved[name].shape[dim] for name, dim in dims.items()}) != 1:
            return moved
        samples = next(moved[name].shape[dim] for name, dim in dims.items())
        count = samples // num_micro_batches
        order = torch.cat([self.order(count) + i * count for i in range(num_micro_batches)])
        return {name: value.index_select(dims[name], order) if name in dims else value for name, value in moved.items()}

    def order(self, samples: int) -> torch.Tensor:
        """The permutation of the samples of a micro-batch."""
        return torch.randperm(samples, generator=self._generator("samples"))

    def put_back(self, outputs: Batch, reference: Batch, samples: int) -> dict[str, torch.Tensor]:
        """Outputs with their samples in the old order, along the dimension that makes them closest to the reference."""
        if not self.permutes:
            return dict(outputs)
        inverse = self.order(samples).argsort()
        chosen = {}
        for name, value in outputs.items():
            dims = [d for d in range(value.dim()) if value.shape[d] == samples]
            choices = [value, *(value.index_select(d, inverse) for d in dims)]
            chosen[name] = min(choices, key=partial(distance, reference=reference[name]))
        return chosen

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed_from(f"{self.seed} {name}"))


class Noise:
    """Runs in which only rounding is different. They are made when a verdict needs them, at most `MAX_RUNS`."""

    def __init__(self, run: Callable[[Change], Steps], reference: Steps, samples: int) -> None:
        self._more = _noise_runs(run, reference, samples)
        self._runs: list[Steps] = []

    def verdict(self, compare: Callable[[Sequence[Steps]], _T], is_open: Callable[[_T, int], bool]) -> _T:
        """`compare` with as many runs as it takes, none if possible."""
        count = 0
        while True:
            result = compare(self._runs[:count])
            if not is_open(result, count):
                return result
            if len(self._runs) == count:
                self._runs.extend(islice(self._more, 1))
            if len(self._runs) == count:
                return result
            count += 1


def _noise_runs(run: Callable[[Change], Steps], reference: Steps, samples: int) -> Iterator[Steps]:
    permutes = samples > 1
    first: Steps | None = None
    for seed in range(MAX_RUNS):
        change = Change(seed=seed, epsilons=2 ** (seed // 2), permutes=permutes and seed % 2 == 1)
        moved = run(change)
        if change.permutes and samples:
            moved.outputs = change.put_back(moved.outputs, reference.outputs, samples)
            assert first is not None
            if not _is_rounding(moved, first, reference):
                permutes = False
                continue
        first = first or moved
        yield moved


def _is_rounding(moved: Steps, first: Steps, reference: Steps) -> bool:
    """Whether the loss of the first step and the outputs moved by no more than rounding."""
    exact = {"loss": moved.losses[0], **moved.outputs}
    other = {"loss": first.losses[0], **first.outputs}
    for name, value in {"loss": reference.losses[0], **reference.outputs}.items():
        dtype = value.dtype if value.is_floating_point() else torch.float64
        noise = error(other[name], value)
        allowed = _ROUNDING * max(torch.finfo(dtype).eps, noise if isfinite(noise) else 0.0)
        if not error(exact[name], value) <= allowed:
            return False
    return True


def samples_of(program: Program, batch: Mapping[str, torch.Tensor], num_micro_batches: int) -> int:
    """The number of samples in a micro-batch, or 0 if inputs hold different numbers."""
    sizes = {batch[i.name].shape[i.batch_dim] for i in program.inputs if i.batch_dim is not None and i.name in batch}
    return sizes.pop() // num_micro_batches if len(sizes) == 1 else 0
