"""Random operators: one generator per set of mesh dimensions that split the value.

A generator is seeded by (seed, step, micro-batch, coordinates on those dimensions): ranks that hold the same values
draw the same numbers, ranks that hold different parts draw independent ones. Within a micro-batch every rank calls the
same operators in the same order, so one generator serves all of them.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.runtime.mesh import MeshDim
from autopar.trace import _torch_private as private

aten = torch.ops.aten


class RandomStream:
    """Numbers for values that the given mesh dimensions split; `begin` restarts it for a micro-batch."""

    def __init__(self, dims: Sequence[MeshDim], seed: int, device: torch.device) -> None:
        self.dims, self.seed, self.device = tuple(dims), seed, device
        self._generators: dict[tuple[int, ...], torch.Generator] = {}
        self._when = (0, 0)
        self.training = True

    def begin(self, step: int, micro_batch: int) -> None:
        """Seed for a micro-batch of a step."""
        self._when = (step, micro_batch)
        self._generators = {}

    def _generator(self, key: tuple[int, ...], at: tuple[int, ...]) -> torch.Generator:
        """`key` tells ranks of one process apart; what is drawn depends on the coordinates `at` alone."""
        if key not in self._generators:
            names = tuple(dim.name for dim in self.dims)
            digest = hashlib.sha256(repr((self.seed, self._when, names, at)).encode()).digest()
            generator = torch.Generator(self.device)
            self._generators[key] = generator.manual_seed(int.from_bytes(digest[:7], "big"))
        return self._generators[key]

    def keep_mask(self, x: torch.Tensor, probability: float) -> torch.Tensor:
        """Boolean mask shaped like `x`, True with probability 1 - `probability`."""

        def draw(generator: torch.Generator, like: torch.Tensor) -> torch.Tensor:
            return torch.rand(like.shape, generator=generator, device=like.device) >= probability

        if private.is_rank_tensor(x):
            return private.map_ranks(
                x, lambda rank, part: draw(self._generator((rank,), tuple(d.of(rank) for d in self.dims)), part)
            )
        at = tuple(dim.coordinate for dim in self.dims)
        return draw(self._generator(at, at), x)

    def next_seed(self) -> int:
        """A seed for an operator that draws from torch's default generator."""
        at = tuple(dim.coordinate for dim in self.dims)
        return int(torch.randint(2**62, (), generator=self._generator(at, at), device=self.device).item())


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

    def of(self, names: Sequence[str]) -> RandomStream:
        """The stream of values that the named mesh dimensions split."""
        key = tuple(names)
        if key not in self._made:
            self._made[key] = RandomStream([self._dims[n] for n in key], self._seed, self._device)
        return self._made[key]

    def begin(self, step: int, micro_batch: int, *, training: bool = True) -> None:
        """Restart every stream for a micro-batch of a step; in evaluation nothing is dropped."""
        for stream in self._made.values():
            stream.begin(step, micro_batch)
            stream.training = training
