"""Random operators: one generator per set of mesh dimensions that split the value.

The seed of a draw has six parts: the seed of the model, the step, the micro-batch, the rank's coordinates on these mesh
dimensions, the call of a block, and the number of the draw in the block. So ranks with equal values draw equal numbers.
Ranks with different parts draw independent numbers. A block that is recomputed draws its numbers again.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar._torch import private
from autopar.lowering.communicator import RandomNumbers
from autopar.lowering.randomness import StreamUse
from autopar.runtime.distributed.mesh import MeshDim


def seed_from(text: str, num_bytes: int = 7) -> int:
    """A number that depends on a text and on nothing else."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:num_bytes], "big")


class CountedDraws:
    """The draws of a call of a block, by their number."""

    _when = (0, 0, 0)
    _draws = 0
    training = True

    def begin(self, step: int, micro_batch: int, call: int = 0, training: bool = True) -> None:
        """What is drawn next is the first draw of a call of a block, in a micro-batch of a step."""
        self._when, self._draws, self.training = (step, micro_batch, call), 0, training

    def _next_draw(self) -> int:
        self._draws += 1
        return self._draws

    def position(self) -> tuple[tuple[int, int, int], int, bool]:
        """The call, the number of draws so far, and whether dropout drops."""
        return self._when, self._draws, self.training

    def go_to(self, position: tuple[tuple[int, int, int], int, bool]) -> None:
        """Draw as at an earlier `position`."""
        when, draws, training = position
        self.begin(*when, training)
        self._draws = draws


class RandomStream(CountedDraws):
    """Numbers for values that the given mesh dimensions split; `begin` says for what."""

    def __init__(self, dims: Sequence[MeshDim], seed: int, device: torch.device) -> None:
        self.dims, self.seed, self.device = tuple(dims), seed, device
        self._generator = torch.Generator(device)

    def _seed_of(self, draw: int, at: tuple[int, ...]) -> int:
        names = tuple(dim.name for dim in self.dims)
        return seed_from(repr((self.seed, self._when, draw, names, at)))

    def keep_mask(self, x: torch.Tensor, probability: float) -> torch.Tensor:
        """Boolean mask shaped like `x`, True with probability 1 - `probability`."""
        number = self._next_draw()

        def draw(at: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
            generator = self._generator.manual_seed(self._seed_of(number, at))
            return torch.rand(like.shape, generator=generator, device=like.device) >= probability

        if private.is_rank_tensor(x):
            return private.map_ranks(x, lambda rank, part: draw(tuple(d.of(rank) for d in self.dims), part))
        return draw(tuple(dim.coordinate for dim in self.dims), x)

    def run(self, operator: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """An operator that draws from torch's default generator, seeded from this stream."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self._seed_of(self._next_draw(), tuple(dim.coordinate for dim in self.dims)))
            return operator(*args, **kwargs)


class Streams:
    """The streams of one model, shared by all its blocks, made when first asked for."""

    def __init__(self, dims: Mapping[str, MeshDim], seed: int, device: torch.device) -> None:
        self._dims, self.seed, self._device = dims, seed, device
        self._made: dict[object, Any] = {}  # the streams that were asked for
        self.training = True

    def of(self, use: StreamUse) -> RandomNumbers:
        """The stream of values that the same mesh dimensions split."""
        new = RandomStream([self._dims[n] for n in use.mesh_dims], self.seed, self._device)
        stream: RandomNumbers = self._made.setdefault(use.mesh_dims, new)
        return stream

    def reseed(self, seed: int) -> None:
        """Draw from another seed from now on."""
        self.seed = seed
        for stream in self._made.values():
            stream.seed = seed

    def begin(self, step: int, micro_batch: int, call: int = 0, *, training: bool = True) -> None:
        """Restart every stream for a call of a block in a micro-batch of a step; in evaluation nothing is dropped."""
        for stream in self._made.values():
            stream.begin(step, micro_batch, call, training)
