"""Layouts as arrays: many candidates of one model on one kind of machine, priced at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.arrays import Floats
from autopar.ir.rank_order import ORDERS
from autopar.ir.rank_order import strides as strides_in_order

RECOMPUTE = ("none", "selective", "full")  # the numbers of `Layouts.recompute`


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Candidates, one entry each; every field broadcasts with the others.

    `virtual` are stages per pipeline rank, `shard` the ranks that ZeRO divides state over (at most dp·cp),
    `micro_batch` sequences of one rank's micro-batch, `micro_batches` of one rank's step, `recompute` the position of
    the kind in `RECOMPUTE`. Tensor ranks are neighbours, the next of `data_ranks` is `data_stride` ranks away, and the
    next pipeline rank `stage_stride` (`layout_strides`). Context and expert ranks lie inside data-parallel ones.
    """

    tp: Floats
    sequence_parallel: Floats
    pp: Floats
    virtual: Floats
    cp: Floats
    ep: Floats
    dp: Floats
    shard: Floats
    zero: Floats
    micro_batch: Floats
    micro_batches: Floats
    recompute: Floats
    data_stride: Floats
    stage_stride: Floats

    @property
    def num_devices(self) -> Floats:
        found: Floats = self.tp * self.pp * self.cp * self.dp
        return found

    @property
    def data_ranks(self) -> Floats:
        """Ranks that hold the same parameters, or shards of them."""
        found: Floats = self.dp * self.cp
        return found

    def at(self, index: Any) -> "Layouts":
        """The candidates of an index or mask."""
        return Layouts(**{name: np.asarray(getattr(self, name))[index] for name in self.__slots__})

    def only(self, names: Sequence[str], index: Any) -> "Layouts":
        """As `at`, in float64 and without the other fields: to read one is an AttributeError, so that what is priced
        once for many candidates cannot depend on a field in which they differ."""
        found = object.__new__(Layouts)
        for name in names:
            column = np.asarray(getattr(self, name))
            column = column if column.size == 1 else column[index]
            object.__setattr__(found, name, column.astype(float))
        return found


def layout_strides(order: Any, *, tp: Floats, pp: Floats, data_ranks: Floats) -> dict[str, Floats]:
    """The strides of layouts by name, for orders that are positions in `ORDERS`."""
    every = [strides_in_order(one, {"tp": tp, "pp": pp, "dp": data_ranks}) for one in ORDERS]
    return {
        name: np.choose(order, [one[of] for one in every])
        for name, of in (("data_stride", "dp"), ("stage_stride", "pp"))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a model its blocks' expressions do not say: how many of which repeated block, and its widths.

    `counts` are the calls of every repeated block by role; "first" and "last" are not among them. Entries broadcast
    with layouts. `element_bytes` are those of weights and activations; `tensor_dims` the mesh dimensions whose product
    is `tp`, where there are several: name, ranks, and how far apart they lie.
    """

    counts: tuple[tuple[str, Floats], ...]
    hidden: Floats
    sequence: Floats
    experts_per_token: Floats
    is_tied: Floats
    element_bytes: float = 2.0
    tensor_dims: tuple[tuple[str, int, int], ...] = ()

    @property
    def blocks(self) -> Floats:
        """All repeated blocks."""
        return np.asarray(sum(count for _, count in self.counts))
