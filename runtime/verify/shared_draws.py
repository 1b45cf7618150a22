"""Random numbers that do not depend on the split, for verification: the same draws on one device and on all ranks.

Every draw makes the whole value, on every rank alike, and a rank keeps its part. A draw is seeded by (seed, step,
micro-batch, call of a block, key of the operator). Training does not draw so: it would make whole values on every rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar._torch import private
from autopar._torch.operators import aten
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.lowering.randomness import OTHER_DROPS, Draw, StreamUse, draws
from autopar.rules.families.random import OF_SHAPE, PER_ELEMENT
from autopar.runtime.codegen.randomness import CountedDraws, Streams, seed_from
from autopar.runtime.distributed.mesh import MeshDim
from autopar.runtime.parameters.shards import coordinates, local_shard

_BERNOULLI = {aten.bernoulli.default: 0, aten.bernoulli.Tensor: 1}  # the position of the probabilities
_NORMAL = (aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)


class SharedStream(CountedDraws):
    """The draws of one block from one stream."""

    def __init__(self, use: StreamUse, mesh: Mesh, dims: Mapping[str, MeshDim], seed: int) -> None:
        self.use, self.mesh, self.dims, self.seed = use, mesh, dims, seed

    def keep_mask(self, x: torch.Tensor, probability: float) -> torch.Tensor:
        """This rank's part of a boolean mask, True with probability 1 - `probability`."""
        draw = self._next()
        return self._part(draw, x, self._uniform(draw, torch.float64) >= probability)

    def run(self, operator: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """This rank's part of the numbers that an operator draws."""
        draw = self._next()
        if operator in _BERNOULLI:
            chance: torch.Tensor = args[_BERNOULLI[operator]]
            return (self._part(draw, chance, self._uniform(draw, chance.dtype)) < chance).to(args[0].dtype)
        if operator in _NORMAL:
            mean, std = (*args, 1.0)[:2]
            like = next(value for value in (mean, std) if isinstance(value, torch.Tensor))
            noise = self._part(draw, like, self._normal(draw, like.dtype))
            shifted: torch.Tensor = noise * std + mean
            return shifted
        if operator is aten.poisson.default:  # rounded normal numbers: here all that counts is that both sides agree
            rate: torch.Tensor = args[0]
            return (rate + rate.sqrt() * self._part(draw, rate, self._normal(draw, rate.dtype))).round().clamp(min=0)
        if operator in OTHER_DROPS:
            return self._affine(draw, operator, *args)
        if operator in OF_SHAPE:
            before, after = args[: OF_SHAPE[operator]], args[OF_SHAPE[operator] + 1 :]
            whole = self._drawn(draw, operator, *before, draw.dims.shape, *after, **kwargs)
            return self._part(draw, whole, whole)
        if operator in PER_ELEMENT:  # whatever its first argument holds
            like = args[0]
            whole = torch.empty(draw.dims.shape, dtype=like.dtype, device=like.device)
            return self._part(draw, like, self._drawn(draw, operator, whole, *args[1:], **kwargs))
        return self._on_every_rank(draw, operator, args, kwargs)

    def _affine(self, draw: Draw, operator: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Dropout that gives a · x + b, with drawn a and b."""
        of_zero, of_one = (
            self._drawn(draw, operator, torch.full(draw.dims.shape, value, dtype=x.dtype, device=x.device), *rest)
            for value in (0.0, 1.0)
        )
        return x * self._part(draw, x, of_one - of_zero) + self._part(draw, x, of_zero)

    def _next(self) -> Draw:
        return [draw for draw in self.use.draws if self.training or not draw.is_dropout][self._next_draw() - 1]

    def _uniform(self, draw: Draw, dtype: torch.dtype) -> torch.Tensor:
        return self._drawn(draw, torch.rand, draw.dims.shape, dtype=dtype)

    def _normal(self, draw: Draw, dtype: torch.dtype) -> torch.Tensor:
        return self._drawn(draw, torch.randn, draw.dims.shape, dtype=dtype)

    def _drawn(self, draw: Draw, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """A function of torch's default generator, seeded for a draw."""
        with torch.random.fork_rng(devices=[]), private.without_ranks():
            torch.manual_seed(seed_from(repr((self.seed, self._when, draw.key))))
            return function(*args, **kwargs)

    def _part(self, draw: Draw, like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole value that this rank holds, or that each rank in this process holds."""
        if private.is_rank_tensor(like) or private.in_one_process():
            return private.from_ranks([self._at(draw, whole, at) for at in coordinates(self.mesh)])
        return self._at(draw, whole, tuple(self.dims[name].coordinate for name in self.mesh.names))

    def _at(self, draw: Draw, whole: torch.Tensor, at: tuple[int, ...]) -> torch.Tensor:
        return local_shard(whole, draw.dims, draw.types, self.mesh, at)

    def _on_every_rank(
        self, draw: Draw, operator: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        """An operator without a rule: its operands and its result are whole on every rank."""
        held = next((a for a in args if private.is_rank_tensor(a)), None)
        if held is None:
            value = self._drawn(draw, operator, *args, **kwargs)
            return private.from_ranks([value] * self.mesh.size) if private.in_one_process() else value

        def on_rank(rank: int, _: torch.Tensor) -> torch.Tensor:
            operands = [private.to_ranks(a, self.mesh.size)[rank] if isinstance(a, torch.Tensor) else a for a in args]
            return self._drawn(draw, operator, *operands, **kwargs)

        return private.map_ranks(held, on_rank)


class SharedDraws(Streams):
    """Streams whose numbers do not depend on the split. `mesh` is the mesh of the types of generated code."""

    def __init__(self, mesh: Mesh, dims: Mapping[str, MeshDim], seed: int = 0) -> None:
        super().__init__(dims, seed, torch.device("cpu"))
        self.mesh = mesh

    def of(self, use: StreamUse) -> SharedStream:
        """The draws of one block from one stream."""
        stream = self._made[len(self._made)] = SharedStream(use, self.mesh, self._dims, self.seed)
        return stream


def on_one_device(seed: int = 0) -> SharedDraws:
    """The draws of the reference."""
    return SharedDraws(Mesh.of(), {}, seed)


def draws_anything(program: Program) -> bool:
    """Whether a program has random operators, dropout included."""
    return any(node.op == "call_function" and draws(node) for block in program.blocks for node in block.graph.nodes)
