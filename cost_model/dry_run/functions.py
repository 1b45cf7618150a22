"""What generated code calls, run on tensors without data: right in shapes and in what autograd keeps, and instead of
sending anything it is written down in a `Ledger`.

Mirrors `autopar.runtime.codegen.conversions`, `vocabulary`, `passes.regather` and `randomness` function by function,
with the names of `autopar.lowering.local_graph`. That both send the same is what `test_priced_is_run.py` shows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar._torch.operators import aten
from autopar._torch.private import wanted_gradients
from autopar.cost_model.machine.collectives import Collective, sent_bytes
from autopar.lowering.local_graph import GATHER_LINEAR, KEPT_GATHER_LINEAR, NAMES

_Message = Collective  # what goes over the wire


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind over one mesh dimension: calls, bytes of what this rank puts in, and of what it sends.

    `bytes` are those of the operand: the shard of an all-gather, the whole of a reduce-scatter and of an all-reduce.
    `sent_bytes` are what one rank sends over the wire under ring algorithms (`autopar.cost_model.machine.collectives`).
    """

    calls: int = 0
    bytes: int = 0
    sent_bytes: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.calls + other.calls, self.bytes + other.bytes, self.sent_bytes + other.sent_bytes)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.calls * times, self.bytes * times, self.sent_bytes * times)


def collective(kind: Collective, ranks: int, operand_bytes: int) -> Traffic:
    """One collective of a rank that puts in so many bytes."""
    whole = operand_bytes * ranks if kind in ("all_gather", "all_to_all") else operand_bytes
    return Traffic(1, operand_bytes, sent_bytes(kind, whole, ranks))


Key = tuple[str, str]  # mesh dimension, kind
Sends = Mapping[Key, Traffic]


@dataclass(slots=True)
class Ledger:
    """What is sent, in sums by (mesh dimension, kind)."""

    entries: dict[Key, Traffic] = field(default_factory=dict)

    def add(self, mesh_dim: str, kind: str, traffic: Traffic, times: int = 1) -> None:
        if times and traffic.calls:
            key = (mesh_dim, kind)
            self.entries[key] = self.entries.get(key, Traffic()) + traffic * times

    def add_all(self, sends: Sends, times: int = 1) -> None:
        for (mesh_dim, kind), traffic in sends.items():
            self.add(mesh_dim, kind, traffic, times)

    def take(self) -> dict[Key, Traffic]:
        """What was written down since the last time."""
        found = dict(self.entries)
        self.entries.clear()
        return found


@dataclass(frozen=True, eq=False)
class PricedDim:
    """A mesh dimension that sends nothing; in place of `autopar.runtime.distributed.mesh.MeshDim`."""

    name: str
    degree: int
    coordinate: int
    ledger: Ledger

    def __repr__(self) -> str:
        return f"<{self.name}: {self.degree} ranks>"

    def sends(self, kind: Collective, operand: torch.Tensor) -> None:
        size = operand.numel() * operand.element_size()
        self.ledger.add(self.name, kind, collective(kind, self.degree, size))


# Primitives, as in autopar.runtime.codegen.conversions.

_Primitive = Callable[[torch.Tensor, PricedDim, int, int], torch.Tensor]


def _identity(x: torch.Tensor, mesh: PricedDim, dim: int, to: int) -> torch.Tensor:
    return x.view_as(x)


def _all_reduce(x: torch.Tensor, mesh: PricedDim, dim: int, to: int) -> torch.Tensor:
    mesh.sends("all_reduce", x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _ordered(gathered: torch.Tensor, mesh: PricedDim, dim: int) -> torch.Tensor:
    if dim == 0:
        return gathered
    out: torch.Tensor = gathered.unflatten(0, (mesh.degree, -1)).movedim(0, dim).flatten(dim, dim + 1)
    return out


def _all_gather(x: torch.Tensor, mesh: PricedDim, dim: int, to: int) -> torch.Tensor:
    mesh.sends("all_gather", x)
    return _ordered(x.new_empty((x.shape[0] * mesh.degree, *x.shape[1:])), mesh, dim)


def _split_first(x: torch.Tensor, mesh: PricedDim, dim: int) -> torch.Tensor:
    if dim == 0:
        return x.contiguous()
    out: torch.Tensor = x.unflatten(dim, (mesh.degree, -1)).movedim(dim, 0).flatten(0, 1).contiguous()
    return out


def _reduce_scatter(x: torch.Tensor, mesh: PricedDim, dim: int, to: int) -> torch.Tensor:
    parts = _split_first(x, mesh, dim)
    mesh.sends("reduce_scatter", parts)
    return parts.new_empty((parts.shape[0] // mesh.degree, *parts.shape[1:]))


def _slice(x: torch.Tensor, mesh: PricedDim, dim: int, to: int) -> torch.Tensor:
    size = x.shape[dim] // mesh.degree
    return x.narrow(dim, mesh.coordinate * size, size).contiguous()


def _place(x: torch.Tensor, mesh: PricedDim, dim: int, to: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= mesh.degree
    return x.new_empty(shape)


def _first_keeps(x: torch.Tensor, mesh: PricedDim, dim: int, to: int) -> torch.Tensor:
    return torch.empty_like(x)


def _all_to_all(x: torch.Tensor, mesh: PricedDim, dim: int, to: int) -> torch.Tensor:
    parts = _split_first(x, mesh, to)
    mesh.sends("all_to_all", parts)
    received: torch.Tensor = torch.empty_like(parts).unflatten(0, (mesh.degree, -1))
    return received.movedim(0, dim).flatten(dim, dim + 1).contiguous()


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: _Primitive, backward: _Primitive, mesh: PricedDim, dim: int, to: int
    ) -> torch.Tensor:
        ctx.backward_of = (backward, mesh, dim, to)
        return forward(x, mesh, dim, to)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        backward, mesh, dim, to = ctx.backward_of
        if backward is _all_to_all:
            dim, to = to, dim
        return backward(grads[0], mesh, dim, to), None, None, None, None, None


_CONVERSIONS: Mapping[str, tuple[_Primitive, _Primitive]] = {
    "invariant_to_replicate": (_identity, _all_reduce),
    "all_reduce_to_invariant": (_all_reduce, _identity),
    "all_reduce_to_replicate": (_all_reduce, _all_reduce),
    "reduce_scatter": (_reduce_scatter, _all_gather),
    "all_gather_to_replicate": (_all_gather, _reduce_scatter),
    "all_gather_to_invariant": (_all_gather, _slice),
    "shard_of_invariant": (_slice, _all_gather),
    "all_to_all": (_all_to_all, _all_to_all),
    "partial_of_invariant": (_first_keeps, _identity),
    "partial_of_shard": (_place, _slice),
    "replicate_to_invariant": (_identity, _first_keeps),
    "shard_of_replicate": (_slice, _place),
    "partial_of_replicate": (_first_keeps, _first_keeps),
}


def _conversion(forward: _Primitive, backward: _Primitive) -> Callable[..., torch.Tensor]:
    def convert(x: torch.Tensor, mesh: PricedDim, dim: int = 0, to: int = 0) -> torch.Tensor:
        out: torch.Tensor = _Convert.apply(x, forward, backward, mesh, dim, to)
        return out

    return convert


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: PricedDim, dim: int, again: bool, *weights: torch.Tensor | None
    ) -> Any:
        ctx.where = (mesh, dim, again)
        whole = _all_gather(x, mesh, dim, 0)
        ctx.save_for_backward(x if again else whole, *weights)
        pairs = zip(weights[::2], weights[1::2], strict=True)
        return tuple(aten.linear.default(whole, weight, bias) for weight, bias in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, *weights = ctx.saved_tensors
        mesh, dim, again = ctx.where
        into_x, *into = wanted_gradients(ctx)
        into = into[3:]
        _whole = _all_gather(kept, mesh, dim, 0) if again and any(into) else kept  # there beside the gradients
        given = [torch.empty_like(weight) if wanted else None for weight, wanted in zip(weights, into, strict=True)]
        summed = _reduce_scatter(grads[0] @ weights[0], mesh, dim, 0) if into_x else None
        return summed, None, None, None, *given


def gather_linear(x: torch.Tensor, mesh: PricedDim, dim: int, *weights: torch.Tensor | None) -> tuple[Any, ...]:
    out: tuple[Any, ...] = _GatherLinear.apply(x, mesh, dim, True, *weights)
    return out


def kept_gather_linear(x: torch.Tensor, mesh: PricedDim, dim: int, *weights: torch.Tensor | None) -> tuple[Any, ...]:
    out: tuple[Any, ...] = _GatherLinear.apply(x, mesh, dim, False, *weights)
    return out


def _own_ids(ids: torch.Tensor, mesh: PricedDim, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    local = ids - mesh.coordinate * size
    mine = (local >= 0) & (local < size)
    return torch.where(mine, local, torch.zeros_like(local)), mine


def vocab_parallel_embedding(
    weight: torch.Tensor, ids: torch.Tensor, padding_idx: int, mesh: PricedDim
) -> torch.Tensor:
    local, mine = _own_ids(ids, mesh, weight.shape[0])
    if padding_idx >= 0:
        rows = torch.where(
            (ids == padding_idx).unsqueeze(-1),
            aten.embedding.default(weight.detach(), local),
            aten.embedding.default(weight, local),
        )
    else:
        rows = aten.embedding.default(weight, local)
    return rows * mine.unsqueeze(-1).to(rows.dtype)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, mesh: PricedDim) -> torch.Tensor:
        highest = logits.amax(-1)
        mesh.sends("all_reduce", highest)
        sums = torch.stack((highest, highest))
        mesh.sends("all_reduce", sums)
        ctx.save_for_backward(torch.exp(logits), target.clone(), target != 0, target != 0)
        return sums[0].sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probabilities, _, _, valid = ctx.saved_tensors
        one = torch.zeros_like(probabilities)
        return (probabilities - one) * valid.to(one.dtype).unsqueeze(-1) * grads[0], None, None


def vocab_parallel_cross_entropy_sum(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, classes: int, mesh: PricedDim
) -> torch.Tensor:
    """A maximum and a sum over ranks, two numbers a token; kept are the probabilities of this rank's classes."""
    out: torch.Tensor = _CrossEntropySum.apply(logits, target, mesh)
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.empty_like(x, dtype=torch.bool)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return grads[0] * mask


def dropout(x: torch.Tensor, probability: float, train: bool = True) -> torch.Tensor:
    """Keeps one byte an element, as the runtime's does."""
    if not train:
        return x
    if probability >= 1:
        return torch.zeros_like(x) * x
    out: torch.Tensor = _Dropout.apply(x)
    return out


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: _conversion(*pair) for name, pair in _CONVERSIONS.items()},
    GATHER_LINEAR: gather_linear,
    KEPT_GATHER_LINEAR: kept_gather_linear,
    "vocab_parallel_embedding": vocab_parallel_embedding,
    "vocab_parallel_cross_entropy_sum": vocab_parallel_cross_entropy_sum,
}
assert FUNCTIONS.keys() == set(NAMES)
