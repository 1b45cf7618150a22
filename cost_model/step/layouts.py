"""Layouts as arrays: many candidates of one model on one kind of machine, priced at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from autopar.ir.arrays import Floats
from autopar.ir.rank_order import ORDERS, strides

RECOMPUTE_MODES = ("none", "selective", "full")  # the numbers of `Layouts.recompute`


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Candidates, one entry each. Every field broadcasts with the others.

    Tensor ranks are neighbours. `layouts_from` derives the distances between the other ranks. Context and expert ranks
    lie inside `data_ranks`.
    """

    tp: Floats
    sequence_parallel: Floats
    pp: Floats
    virtual: Floats  # stages per pipeline rank
    cp: Floats
    ep: Floats
    etp: Floats  # tensor ranks that split each expert; the other tensor ranks hold other experts
    dp: Floats
    shard: Floats  # ranks that ZeRO divides state over, at most dp·cp
    zero: Floats
    micro_batch: Floats  # sequences in one micro-batch of one rank
    micro_batches: Floats  # micro-batches in one rank's step
    recompute: Floats  # position of the kind in `RECOMPUTE_MODES`
    data_stride: Floats  # distance in ranks to the next of `data_ranks`
    stage_stride: Floats  # distance in ranks to the next pipeline rank

    @property
    def num_devices(self) -> Floats:
        count: Floats = self.tp * self.pp * self.cp * self.dp
        return count

    @property
    def expert_replicas(self) -> Floats:
        """Factor of the replicas of an expert, because fewer ranks than the tensor ranks split it."""
        return np.asarray(self.tp / self.etp)

    @property
    def data_ranks(self) -> Floats:
        """Ranks that hold the same parameters, or shards of them."""
        count: Floats = self.dp * self.cp
        return count

    def at(self, index: Any) -> "Layouts":
        """The candidates of an index or mask."""
        return Layouts(**{name: np.asarray(getattr(self, name))[index] for name in self.__slots__})

    def only(self, names: Sequence[str], index: Any) -> "Layouts":
        """As `at`, in float64 and with the fields `names` only."""
        few = object.__new__(Layouts)
        for name in names:
            column = np.asarray(getattr(self, name))
            column = column if column.size == 1 else column[index]
            object.__setattr__(few, name, column.astype(float))
        return few


def layouts_from(
    *,
    tp: ArrayLike,
    pp: ArrayLike,
    dp: ArrayLike,
    shard: ArrayLike,
    zero: ArrayLike,
    micro_batch: ArrayLike,
    micro_batches: ArrayLike,
    sequence_parallel: ArrayLike,
    recompute: ArrayLike,
    virtual: ArrayLike = 1,
    cp: ArrayLike = 1,
    ep: ArrayLike = 1,
    etp: ArrayLike | None = None,
    order: Any = 0,
) -> Layouts:
    """Layouts from their degrees, which broadcast. `order` holds positions in `ORDERS`; all else is as in `Layouts`."""
    given = {
        "tp": tp, "sequence_parallel": sequence_parallel, "pp": pp, "virtual": virtual, "cp": cp, "ep": ep,
        "etp": tp if etp is None else etp, "dp": dp, "shard": shard, "zero": zero, "micro_batch": micro_batch,
        "micro_batches": micro_batches, "recompute": recompute,
    }  # fmt: skip
    every = np.broadcast_arrays(*(np.asarray(column, dtype=float) for column in given.values()))
    columns = dict(zip(given, every, strict=True))
    sizes = {"tp": columns["tp"], "pp": columns["pp"], "dp": columns["dp"] * columns["cp"]}
    lie = [strides(each, sizes) for each in ORDERS]
    data_stride, stage_stride = (np.choose(order, [at[name] for at in lie]) for name in ("dp", "pp"))
    return Layouts(**columns, data_stride=data_stride, stage_stride=stage_stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's block counts and widths, which its blocks' expressions do not hold. Entries broadcast with layouts."""

    counts: tuple[tuple[str, Floats], ...]  # calls of every repeated block by role, without "first" and "last"
    hidden: Floats
    sequence: Floats
    experts_per_token: Floats
    is_tied: Floats
    element_bytes: float = 2.0  # of weights in blocks and of activations
    stored_bytes: float = 4.0  # of weights between steps and of gradients; master weights if more than `element_bytes`
    moment_bytes: float = 8.0  # of the optimizer's state of one trained parameter; Adam's two moments
    # name, ranks and stride of each mesh dimension, if several dimensions multiply to `tp`
    tensor_dims: tuple[tuple[str, int, int], ...] = ()
    context_dims: tuple[tuple[str, int, int], ...] = ()  # of `cp`, in strides of `cp`

    @property
    def has_master_weights(self) -> bool:
        """Whether blocks compute with casts of the stored weights."""
        return self.stored_bytes > self.element_bytes

    @property
    def blocks(self) -> Floats:
        """The number of calls of repeated blocks."""
        return np.asarray(sum(count for _, count in self.counts))
