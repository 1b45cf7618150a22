"""Very many layouts of one model priced at once: seconds, peak memory, and whether they fit.

Most of a price depends on few fields. What a micro-batch takes in a block, and keeps, is priced once for each
combination of micro-batch, tensor, sequence, context and expert parallelism that occurs; what data-parallel ranks send,
and the parameters that a rank has, once for each way to place ranks (`RANK_FIELDS`). The rest is arithmetic for every
layout, in pieces that stay in the processor's cache. The formulas are those of `step_seconds` and `step_memory`, which
price every field of every layout: same results.

A family of captured blocks prices any tensor degree (`autopar.cost_model.screened_model`). A captured program has been
labelled for one, so that a search over several labels it for each (`autopar.planning.estimate.priceable_of`, once per
tensor degree, with or without sequence parallelism, at a data-parallel degree above 1) and hands all of them to
`screen`, which prices a layout with the program of its degree. Stages are equal and 1F1B's closed form holds; a plan's
own cuts and schedule are priced by `autopar.cost_model.estimate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.machine.fitted_constants import Mechanisms, mechanisms
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.memory.formula import (
    BlockBytes,
    RankElements,
    block_bytes,
    ends_bytes,
    fuller,
    rank_elements,
)
from autopar.cost_model.published.estimate import FULL
from autopar.cost_model.screened_model import ScreenedModel
from autopar.cost_model.step.assembly import StepPrices, assembled, blocks_per_rank
from autopar.cost_model.step.block_prices import BlockPrices, block_prices, end_passes
from autopar.cost_model.step.context import Basis, Machine, Passes, repeated_roles
from autopar.cost_model.step.data_parallel import (
    DataPrices,
    Gathers,
    data_prices,
    end_gathers,
    gather_prices,
    gathers_blocks,
)
from autopar.cost_model.step.experts import with_experts
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.unique_rows import Distinct, Numbered, distinct, numbered, spread
from autopar.errors import InputError
from autopar.ir.arrays import Floats
from autopar.ir.cluster import ClusterSpec

RANK_FIELDS = ("tp", "pp", "cp", "ep", "dp", "shard", "data_stride")
PIECE = 16_384  # layouts at once: an array of them is a sixteenth of two megabytes of cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What layouts run on: a machine under an engine, in a precision, and the memory of its devices."""

    machine: Machine
    engine: Engine
    mechanisms: Mechanisms
    in_float8: bool
    reserve_bytes: float
    memory_bytes: float

    @property
    def fused(self) -> bool:
        """Whether attention is one kernel."""
        return self.engine.attention == "fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """Of every layout: seconds of a step, bytes of the fullest rank with the allocator's cache, and whether it fits
    without that cache, as in `Estimate.fits`."""

    seconds: NDArray[np.float64]
    peak_bytes: NDArray[np.float64]
    fits: NDArray[np.bool_]


def target_of(cluster: ClusterSpec, engine: Engine, *, precision: str, profile: DeviceProfile | None = None) -> Target:
    """A cluster as `autopar.cost_model.machine.cluster` sees it; raises what that raises."""
    constants = mechanisms()
    found = cluster_machine(cluster, engine, constants, precision=precision, profile=profile)
    return Target(
        machine=found.machine,
        engine=engine,
        mechanisms=constants,
        in_float8=precision == "fp8",
        reserve_bytes=found.profile.reserve_bytes,
        memory_bytes=found.memory_bytes,
    )


def screen(models: Sequence[ScreenedModel], layouts: Layouts, target: Target) -> Screened:
    """Price every layout, in its order, with the model that is for its tensor and sequence parallelism.

    Fields are arrays of one length, or of length 1 where all layouts agree, of any type of number; the smaller the
    type, the less memory moves. Raises InputError where no model, or more than one, is for a layout, and for fields of
    unlike lengths.
    """
    size = _size(layouts)
    found = Screened(seconds=np.empty(size), peak_bytes=np.empty(size), fits=np.empty(size, dtype=bool))
    taken = np.zeros(size, dtype=bool)
    for model in models:
        wanted = _wanted(model, layouts)
        if wanted is None and len(models) == 1:
            _fill(model, layouts, target, found)
            return found
        rows = np.arange(size) if wanted is None else np.flatnonzero(np.broadcast_to(wanted, size))
        if taken[rows].any():
            raise InputError(f"two models are for the same layouts, the second is {model.name}; give one for each")
        taken[rows] = True
        if len(rows):
            own = Screened(
                seconds=np.empty(len(rows)), peak_bytes=np.empty(len(rows)), fits=np.empty(len(rows), dtype=bool)
            )
            _fill(model, _taken(layouts, rows), target, own)
            found.seconds[rows], found.peak_bytes[rows], found.fits[rows] = own.seconds, own.peak_bytes, own.fits
    if not taken.all():
        first = int(np.argmin(taken))
        one = _taken(layouts, np.array([first]))
        raise InputError(
            f"no model is for layout {first}, of tensor degree {float(one.tp[0]):g} and sequence parallelism "
            f"{bool(one.sequence_parallel[0])}; give a program labelled for it"
        )
    return found


def _size(layouts: Layouts) -> int:
    sizes = {name: np.asarray(getattr(layouts, name)).size for name in Layouts.__slots__}
    lengths = sorted(set(sizes.values()) - {1})
    if len(lengths) > 1 or 0 in lengths:
        named = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise InputError(f"fields must have as many entries as there are layouts, or one; they have {named}")
    return lengths[0] if lengths else 1


def _wanted(model: ScreenedModel, layouts: Layouts) -> Any:
    """Which layouts a model is for; None for all."""
    if model.tp is None:
        return None
    return (np.asarray(layouts.tp) == model.tp) & (np.asarray(layouts.sequence_parallel) == model.sequence_parallel)


def _taken(layouts: Layouts, rows: Any) -> Layouts:
    columns = {name: np.asarray(getattr(layouts, name)) for name in Layouts.__slots__}
    return Layouts(**{name: spread(column, rows) for name, column in columns.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prices:
    """Prices of the combinations of block fields, and of those of rank fields."""

    blocks: dict[str, BlockPrices]
    first: Passes
    last: Passes
    kept: BlockBytes
    gathers: dict[str, Gathers]
    end_gathers: Floats
    data: DataPrices
    elements: RankElements


def _fill(model: ScreenedModel, layouts: Layouts, target: Target, found: Screened) -> None:
    """Price every layout with one model."""
    columns = {name: numbered(np.asarray(getattr(layouts, name))) for name in {*model.block_fields, *RANK_FIELDS}}
    size = len(found.seconds)
    of_blocks, of_ranks = (_combined(columns, names, size) for names in (model.block_fields, RANK_FIELDS))
    basis = Basis(
        shape=model.shape,
        machine=target.machine,
        engine=target.engine,
        mechanisms=target.mechanisms,
        in_float8=target.in_float8,
        fused=target.fused,
    )
    prices = _prices(
        basis,
        model,
        layouts.only(model.block_fields, of_blocks.rows),
        layouts.only(RANK_FIELDS, of_ranks.rows),
    )
    for start in range(0, size, PIECE):
        piece = slice(start, start + PIECE)
        indices = [None if one.index is None else one.index[piece] for one in (of_blocks, of_ranks)]
        _fill_piece(basis, prices, layouts.only(Layouts.__slots__, piece), indices, target, found, piece)


def _combined(columns: dict[str, Numbered], names: Sequence[str], size: int) -> Distinct:
    return distinct([columns[name] for name in names], size)


def _prices(basis: Basis, model: ScreenedModel, of_blocks: Layouts, of_ranks: Layouts) -> _Prices:
    shape, engine = basis.shape, basis.engine
    family, bare = model.blocks(of_blocks), model.parameters(of_ranks)
    kept = block_bytes(family, shape, of_blocks, engine, fused=basis.fused)
    if "ep" in model.block_fields:
        family = with_experts(family, of_blocks, basis.mechanisms)
    roles = repeated_roles(shape)
    per_rank, _ = blocks_per_rank(shape.blocks, of_ranks, engine)
    return _Prices(
        blocks={role: block_prices(basis, family, of_blocks, role)[0] for role in roles},
        first=end_passes(basis, family, of_blocks, "first"),
        last=end_passes(basis, family, of_blocks, "last"),
        kept=kept,
        gathers={role: gather_prices(basis, bare, of_ranks, role) for role in roles},
        end_gathers=end_gathers(basis, bare, of_ranks),
        data=data_prices(basis, bare, of_ranks, per_rank),
        elements=rank_elements(bare, shape, of_ranks),
    )


def _fill_piece(
    basis: Basis,
    prices: _Prices,
    layouts: Layouts,
    indices: Sequence[Any],
    target: Target,
    found: Screened,
    piece: slice,
) -> None:
    of_blocks, of_ranks = indices
    gathers = prices.gathers.items() if np.any(gathers_blocks(layouts)) else ()
    data = prices.data.at(of_ranks)
    step = assembled(
        basis,
        layouts,
        StepPrices(
            blocks={role: one.at(of_blocks) for role, one in prices.blocks.items()},
            first=prices.first.at(of_blocks),
            last=prices.last.at(of_blocks),
            gathers={role: one.at(of_ranks) for role, one in gathers},
            end_gathers=spread(prices.end_gathers, of_ranks),
            data=lambda _: data,
        ),
    )
    first, last = ends_bytes(
        basis.shape,
        layouts,
        basis.engine,
        prices.kept.at(of_blocks),
        prices.elements.at(of_ranks),
        reserve_bytes=target.reserve_bytes,
        cache=basis.mechanisms.allocator_cache,
    )
    peak = np.maximum(first.total, last.total)
    found.seconds[piece], found.peak_bytes[piece] = step.seconds, peak
    found.fits[piece] = peak - fuller(first, last, first.cache, last.cache) <= FULL * target.memory_bytes
