"""Recomputation of a plan: the operators of selective recomputation, and the least recomputation that fits.

`recompute = "selective"` in a wish recomputes the operators that leave the fewest saved bytes for 10 % more FLOP. A
search, and `recompute = "auto"`, recompute the operators that free more bytes for each second than full recomputation.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from autopar.capture.analysis import Analysis
from autopar.cost_model.machine.machine import Speeds
from autopar.cost_model.work.block_work import BlockWork, evaluate, sizes_on
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh

if TYPE_CHECKING:
    from autopar.cost_model.work.export import SymbolicWork
    from autopar.cost_model.work.fusion import Flow
    from autopar.cost_model.work.polynomials import Polynomial
    from autopar.cost_model.work.recomputable import Recomputable
    from autopar.search.bounds.lower_bounds import Machinery

SELECTS = ("selective", "auto")  # the values of `Degrees.recompute` that read `BlockLabels.recomputed`
Choose: TypeAlias = "Callable[[Recomputable[float], BlockWork[float]], tuple[str, ...]]"


def without_unread(labels: Sequence[BlockLabels], degrees: Degrees) -> tuple[BlockLabels, ...]:
    """Labels that name recomputed operators only if the degrees read them."""
    return tuple(b if degrees.recompute in SELECTS else replace(b, recomputed=()) for b in labels)


def repeated_blocks(program: Program) -> list[int]:
    """The distinct blocks that are called more than once; all blocks if there are none."""
    repeated = [i for i in range(len(program.blocks)) if len(program.uses_of_block(i)) > 1]
    return repeated or list(range(len(program.blocks)))


def recomputable_of(flow: "Flow", work: "SymbolicWork") -> "Recomputable[Polynomial]":
    """What a block saves, and the operators that can be recomputed."""
    from autopar.cost_model.work.recomputable import recomputable  # not needed if works are kept

    return recomputable(flow, (*work.products, *work.eager))


def chosen_keys(
    values: "Recomputable[Polynomial]", work: "SymbolicWork", mesh: Mesh, sequence: int | None, choose: Choose
) -> tuple[str, ...]:
    """The keys of the operators of a block that selective recomputation computes again."""
    return choose(*evaluate((values, work), sizes_on(mesh, sequence)))


def fastest(speeds: Speeds) -> Choose:
    """The rule of a search."""
    from autopar.search.labels.recomputed_operators import by_seconds  # HiGHS is not needed if labels are kept

    return partial(by_seconds, speeds=speeds)


def with_recomputed(
    program: Program,
    analysis: Analysis,
    labels: Sequence[BlockLabels],
    degrees: Degrees,
    speeds: Speeds,
    *,
    regather: bool,
) -> tuple[BlockLabels, ...]:
    """Labels with the recomputed operators of a wish, in every repeated block."""
    from autopar.cost_model.work.export import block_runs, flow_of, work_of
    from autopar.cost_model.work.sizes import Naming
    from autopar.search.labels.recomputed_operators import by_flops

    if degrees.recompute not in SELECTS:
        return tuple(labels)
    choose = by_flops if degrees.recompute == "selective" else fastest(speeds)
    runs, naming, changed = block_runs(program, analysis), Naming(analysis, degrees.mesh), list(labels)
    for index in repeated_blocks(program):
        flow = flow_of(program, index, labels[index], naming, runs[index], regather)
        work = work_of(flow)
        keys = chosen_keys(recomputable_of(flow, work), work, degrees.mesh, program.sequence, choose)
        changed[index] = replace(labels[index], recomputed=keys)
    return tuple(changed)


def decided(works: ProgramWorks, degrees: Degrees, on: "Machinery", cuts: tuple[int, ...]) -> Degrees:
    """The degrees with the least recomputation that fits, if they leave it open; all blocks if nothing fits."""
    from autopar.search.pricing.exact import priced

    if not degrees.is_recompute_open:
        return degrees
    machinery = replace(on.keeping(degrees.offload), cuts=cuts or None)
    return priced(works, replace(degrees, recompute="none"), machinery).degrees
