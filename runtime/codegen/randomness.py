"""Random operators: one generator per set of mesh dimensions that split the value.

Every draw is seeded by (seed, step, micro-batch, coordinates on those dimensions, call of a block, number of the draw
in it): ranks that hold the same values draw the same numbers, ranks that hold different parts draw independent ones,
and a block that is run again (recomputation) draws the same numbers again, whatever ran in between.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar._torch import private
from autopar._torch.operators import aten
from autopar.runtime.distributed.mesh import MeshDim


class RandomStream:
    """Numbers for values that the given mesh dimensions split; `begin` says for what."""

    def __init__(self, dims: Sequence[MeshDim], seed: int, device: torch.device) -> None:
        self.dims, self.seed, self.device = tuple(dims), seed, device
        self._generator = torch.Generator(device)
        self._when = (0, 0, 0)
        self._draws = 0
        self.training = True

    def begin(self, step: int, micro_batch: int, call: int = 0) -> None:
        """What is drawn next is the first draw of a call of a block, in a micro-batch of a step."""
        self._when = (step, micro_batch, call)
        self._draws = 0

    def _seed_of(self, draw: int, at: tuple[int, ...]) -> int:
        names = tuple(dim.name for dim in self.dims)
        digest = hashlib.sha256(repr((self.seed, self._when, draw, names, at)).encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def _next_draw(self) -> int:
        self._draws += 1
        return self._draws

    def keep_mask(self, x: torch.Tensor, probability: float) -> torch.Tensor:
        """Boolean mask shaped like `x`, True with probability 1 - `probability`."""
        number = self._next_draw()

        def draw(at: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
            generator = self._generator.manual_seed(self._seed_of(number, at))
            return torch.rand(like.shape, generator=generator, device=like.device) >= probability

        if private.is_rank_tensor(x):
            return private.map_ranks(x, lambda rank, part: draw(tuple(d.of(rank) for d in self.dims), part))
        return draw(tuple(dim.coordinate for dim in self.dims), x)

    def next_seed(self) -> int:
        """A seed for an operator that draws from torch's default generator."""
        return self._seed_of(self._next_draw(), tuple(dim.coordinate for dim in self.dims))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return x * mask * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return grads[0] * mask * ctx.scale, None, None


def dropout(x: torch.Tensor, probability: float, stream: RandomStream) -> torch.Tensor:
    """Zero elements with the given probability and scale the rest; saves one byte an element for backward."""
    if not stream.training:
        return x
    if probability >= 1:
        return torch.zeros_like(x) * x
    out: torch.Tensor = _Dropout.apply(x, stream.keep_mask(x, probability), 1 / (1 - probability))
    return out


def drawn(stream: RandomStream, operator: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run an operator that draws from torch's default generator, seeded from `stream`; fused kernels included."""
    devices = [stream.device] if stream.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(stream.next_seed())
        return operator(*args, **kwargs)


def attention_with_dropout(stream: RandomStream, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`scaled_dot_product_attention` whose dropout draws from `stream`; without dropout in evaluation."""
    attention = aten.scaled_dot_product_attention.default
    if stream.training:
        return drawn(stream, attention, *args, **kwargs)
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
    out: torch.Tensor = attention(*args[:3], **{**named, "dropout_p": 0.0})
    return out


class Streams:
    """The streams of one model, shared by all its blocks, made when first asked for."""

    def __init__(self, dims: Mapping[str, MeshDim], seed: int, device: torch.device) -> None:
        self._dims, self._seed, self._device = dims, seed, device
        self._made: dict[tuple[str, ...], RandomStream] = {}
        self.training = True

    def of(self, names: Sequence[str]) -> RandomStream:
        """The stream of values that the named mesh dimensions split."""
        key = tuple(names)
        if key not in self._made:
            self._made[key] = RandomStream([self._dims[n] for n in key], self._seed, self._device)
        return self._made[key]

    def begin(self, step: int, micro_batch: int, call: int = 0, *, training: bool = True) -> None:
        """Restart every stream for a call of a block in a micro-batch of a step; in evaluation nothing is dropped."""
        for stream in self._made.values():
            stream.begin(step, micro_batch, call)
            stream.training = training
