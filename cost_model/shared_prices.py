"""The prices that layouts of one tensor degree share: blocks and gathers, for every combination that occurs.

A search screens and prices its candidates with them, so a bound and a price are one function. A block is priced once
for all layouts that have the same `block_fields`, a gather once for all whose ranks lie in the same places.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.memory.formula import (
    BlockBytes,
    Ends,
    StepMemory,
    block_bytes,
    end_parameters,
    memory_of_ends,
)
from autopar.cost_model.memory.per_stage import RoleBytes, role_bytes
from autopar.cost_model.pricing import family_at, shape_of_works
from autopar.cost_model.step.assembly import StepPrices
from autopar.cost_model.step.block_prices import block_prices, end_passes
from autopar.cost_model.step.context import Basis, Passes, repeated_roles
from autopar.cost_model.step.data_parallel import (
    RANK_FIELDS,
    DataPrices,
    Gathers,
    data_prices,
    end_gathers,
    gather_prices,
    gathers_blocks,
)
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.unique_rows import distinct, numbered, spread
from autopar.cost_model.work.block_work import VARIANTS, Family, free_symbols
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.arrays import Floats
from autopar.ir.sharding import splits_samples

_Index = NDArray[np.intp]


class SharedPrices:
    """Prices of candidates in the order of `layouts` (without recomputation)."""

    def __init__(self, works: ProgramWorks, layouts: Layouts, machine: Machine) -> None:
        self.basis, self.layouts = Basis(shape=shape_of_works(works), machine=machine), layouts
        fields = block_fields(works.family)
        columns = {name: numbered(getattr(layouts, name)) for name in {*fields, *RANK_FIELDS}}
        groups, of_ranks = (distinct([columns[name] for name in names]) for names in (fields, RANK_FIELDS))
        self.row, self.place = (
            each.numbers(len(layouts.tp)) for each in (groups, of_ranks)
        )  # of a layout's blocks, and of its ranks
        self.few, self.places = layouts.only(fields, groups.rows), layouts.only(RANK_FIELDS, of_ranks.rows)
        self.row_of_place = self.row[of_ranks.rows]
        self.family = family_at(works, self.few, machine.mechanisms)
        roles = repeated_roles(self.basis.shape)
        self.blocks = {role: block_prices(self.basis, self.family, self.few, role) for role in roles}
        self.ends = {role: end_passes(self.basis, self.family, self.few, role) for role in ("first", "last")}

    def prices(self, index: Any, *, with_parts: bool = True) -> StepPrices:
        """The prices of the steps of some candidates, perhaps without the parts of a block's seconds."""
        row, place = self.row[index], self.place[index]
        known: dict[bytes, DataPrices] = {}  # levels of recomputation have the same blocks

        def data(per_rank: Floats) -> DataPrices:
            per_rank = np.broadcast_to(per_rank, place.shape)
            key = per_rank.tobytes()
            if key not in known:
                each = distinct([numbered(place), numbered(per_rank)])
                places = place[each.rows]
                at, family = self.places.only(RANK_FIELDS, places), self.parameters(self.row_of_place[places])
                known[key] = spread(data_prices(self.basis, family, at, per_rank[each.rows]), each.index)
            return known[key]

        layouts = self.layouts.at(index)
        has_gathers, has_end_gathers = np.any(gathers_blocks(layouts)), np.any(layouts.zero >= 3)
        blocks = self.blocks if with_parts else {r: replace(b, parts={}, hidden={}) for r, b in self.blocks.items()}
        return StepPrices(
            blocks=spread(blocks, row),
            first=spread(self.ends["first"], row),
            last=spread(self.ends["last"], row),
            gathers=spread(self._gathers, place) if has_gathers else {},
            end_gathers=spread(self._end_gathers, place) if has_end_gathers else np.zeros(1),
            data=data,
        )

    def unstaged_memory(self, layouts: Layouts, index: _Index) -> StepMemory:
        """Memory of the candidates without stages that have these layouts."""
        blocks, ends = spread(self.bytes_of_blocks, self.row[index]), spread(self._ends, self.place[index])
        return memory_of_ends(layouts, self.basis, blocks, ends)

    @cached_property
    def bytes_of_blocks(self) -> BlockBytes:
        """The bytes that blocks and head keep, by a candidate's row."""
        return block_bytes(self.family, self.few, self.basis)

    @cached_property
    def bytes_of_roles(self) -> RoleBytes:
        """The bytes that every role saves and holds, by a candidate's row."""
        return role_bytes(self.family, self.few, self.basis)

    @cached_property
    def passes(self) -> list[dict[str, tuple[float, float]]]:
        """Seconds of one micro-batch in every role of a staged candidate, by its row: forward, and both passes."""
        size = len(self.few.tp)
        seconds_of: list[dict[str, tuple[float, float]]] = [{} for _ in range(size)]
        blocks = {role: Passes(forward=one.forward, backward=one.backward) for role, one in self.blocks.items()}
        for role, passes in (blocks | self.ends).items():
            columns = (np.broadcast_to(values, size).tolist() for values in (passes.forward, passes.both))
            for row, seconds in zip(seconds_of, zip(*columns, strict=True), strict=True):
                row[role] = seconds
        return seconds_of

    @cached_property
    def _gathers(self) -> dict[str, Gathers]:
        family = self.parameters(self.row_of_place)
        return {role: gather_prices(self.basis, family, self.places, role) for role in self.blocks}

    @cached_property
    def _end_gathers(self) -> Floats:
        return end_gathers(self.basis, self.parameters(self.row_of_place), self.places)

    @cached_property
    def _ends(self) -> Ends:
        return end_parameters(self.parameters(self.row_of_place), self.places, self.basis)

    def parameters(self, row: _Index) -> Family[Any]:
        """The blocks of rows with the numbers of their parameters alone."""
        names = ("parameters_split", "parameters_whole", "parameters_expert", "frozen_dense", "frozen_expert")
        blocks = []
        for role in self.family.roles:
            work = self.family.block(role, VARIANTS[0])
            given = {name: value for name in names if (value := getattr(work, name)) is not None}
            counts: dict[str, Any] = {name: spread(np.asarray(value), row) for name, value in given.items()}
            bare = replace(work, products=(), eager=(), fused=(), sent=(), selected=None, **counts)
            blocks.append((role, tuple((variant, bare) for variant in VARIANTS)))
        return replace(self.family, blocks=tuple(blocks))


def block_fields(family: Family[Any]) -> tuple[str, ...]:
    """The fields of layouts that the prices of blocks depend on."""
    works = [family.block(role, VARIANTS[0]) for role in family.roles]
    names = free_symbols(tuple(works))
    sums = any(splits_samples(sent.mesh_dim) and sent.of != "parameter" for work in works for sent in work.sent)
    has_experts = any(role.startswith("moe_layer") for role in family.roles)
    return (
        *("tp", "sequence_parallel", "cp", "micro_batch"),
        *(["ep", "etp"] if has_experts or sums or "ep" in names else []),
        *(["dp"] if sums or "d" in names else []),
        *(["data_stride"] if sums else []),
    )
