"""The prices that candidates of one tensor degree share: blocks and gathers, for every combination that occurs."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.memory.formula import (
    BlockBytes,
    Ends,
    MemoryBasis,
    StepMemory,
    block_bytes,
    end_parameters,
    memory_basis,
    memory_of_ends,
)
from autopar.cost_model.memory.per_stage import RoleBytes, role_bytes
from autopar.cost_model.screened_model import model_of_program
from autopar.cost_model.step.assembly import StepPrices
from autopar.cost_model.step.block_prices import block_prices, end_passes
from autopar.cost_model.step.context import Passes, repeated_roles
from autopar.cost_model.step.data_parallel import (
    RANK_FIELDS,
    Gathers,
    data_prices,
    end_gathers,
    gather_prices,
    gathers_blocks,
)
from autopar.cost_model.step.experts import with_experts
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.unique_rows import distinct, numbered, spread
from autopar.cost_model.work.block_work import VARIANTS, Family
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.arrays import Floats
from autopar.search.bounds.lower_bounds import Machinery, basis_of

_Index = NDArray[np.intp]


class SharedPrices:
    """Prices of candidates in the order of `layouts` (without recomputation)."""

    def __init__(self, works: ProgramWorks, layouts: Layouts, on: Machinery) -> None:
        self.basis, self.layouts, self.on = basis_of(works, on), layouts, on
        model, size = model_of_program(works), len(layouts.tp)
        names = dict.fromkeys((*model.block_fields, "ep"))
        columns = {name: numbered(getattr(layouts, name)) for name in {*names, *RANK_FIELDS}}
        groups = distinct([columns[name] for name in names])
        self.row = np.zeros(size, dtype=np.intp) if groups.index is None else groups.index  # of a candidate's blocks
        self.few = layouts.only(tuple(names), groups.rows)
        of_ranks = distinct([columns[name] for name in RANK_FIELDS])
        self.place = np.zeros(size, dtype=np.intp) if of_ranks.index is None else of_ranks.index
        rows = of_ranks.rows
        self.places, self.row_of_place = layouts.only(RANK_FIELDS, rows), self.row[rows]
        self.family = with_experts(model.blocks(self.few), self.few, on.machine.mechanisms)
        self.blocks = {
            role: block_prices(self.basis, self.family, self.few, role) for role in repeated_roles(self.basis.shape)
        }
        self.ends = {role: end_passes(self.basis, self.family, self.few, role) for role in ("first", "last")}

    def at(self, index: _Index, recompute: Floats) -> tuple[Layouts, StepPrices]:
        """Candidates with a level of recomputation each (a position in `RECOMPUTE`), and the prices of their steps."""
        layouts, row = replace(self.layouts.at(index), recompute=recompute), self.row[index]
        first, last = (replace(one.at(row), weight=spread(np.asarray(one.weight), row)) for one in self.ends.values())
        place, family = self.place[index], self._parameters(row)
        has_gathers, has_end_gathers = np.any(gathers_blocks(layouts)), np.any(layouts.zero >= 3)
        prices = StepPrices(
            blocks={role: passes.at(row) for role, passes in self.blocks.items()},
            first=first,
            last=last,
            gathers={role: passes.at(place) for role, passes in self._gathers.items()} if has_gathers else {},
            end_gathers=spread(self._end_gathers, place) if has_end_gathers else np.zeros(1),
            data=lambda per_rank: data_prices(self.basis, family, layouts, per_rank),
        )
        return layouts, prices

    def unstaged_memory(self, layouts: Layouts, index: _Index) -> StepMemory:
        """Memory of the candidates without stages that have these layouts."""
        first, last = (rank.at(self.place[index]) for rank in self._ends)
        return memory_of_ends(layouts, self.memory_basis, self._bytes_of_blocks.at(self.row[index]), (first, last))

    @cached_property
    def memory_basis(self) -> MemoryBasis:
        """What the memory of every candidate depends on."""
        return memory_basis(self.basis.shape, self.basis.machine, fused=self.basis.fused)

    @cached_property
    def bytes_of_roles(self) -> RoleBytes:
        """The bytes that every role saves and holds, by a candidate's row."""
        return role_bytes(self.family, self.few, self.memory_basis)

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
    def selective_s(self) -> list[dict[str, float]]:
        """Seconds of selective recomputation of every repeated role, by a candidate's row."""
        size = len(self.few.tp)
        columns = {role: np.broadcast_to(passes.selective, size).tolist() for role, passes in self.blocks.items()}
        return [{role: seconds[row] for role, seconds in columns.items()} for row in range(size)]

    @cached_property
    def _gathers(self) -> dict[str, Gathers]:
        family = self._parameters(self.row_of_place)
        return {role: gather_prices(self.basis, family, self.places, role) for role in self.blocks}

    @cached_property
    def _end_gathers(self) -> Floats:
        return end_gathers(self.basis, self._parameters(self.row_of_place), self.places)

    @cached_property
    def _bytes_of_blocks(self) -> BlockBytes:
        return block_bytes(self.family, self.few, self.memory_basis)

    @cached_property
    def _ends(self) -> Ends:
        return end_parameters(self._parameters(self.row_of_place), self.places, self.memory_basis)

    def _parameters(self, row: _Index) -> Family[Any]:
        """The blocks of rows with the numbers of their parameters alone."""
        blocks = []
        for role in self.family.roles:
            work = self.family.block(role, VARIANTS[0])
            bare = replace(
                work,
                products=(),
                eager=(),
                fused=(),
                sent=(),
                selected=None,
                parameters_split=spread(np.asarray(work.parameters_split), row),
                parameters_whole=spread(np.asarray(work.parameters_whole), row),
                parameters_expert=spread(np.asarray(work.parameters_expert), row),
            )
            blocks.append((role, tuple((variant, bare) for variant in VARIANTS)))
        return replace(self.family, blocks=tuple(blocks))
