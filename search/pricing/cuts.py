"""Where a program is cut into pipeline stages: by calibrated seconds, by hand, or as its parameters are held.

A call weighs the seconds of its block's passes on one rank for one micro-batch, without recomputation and without
collectives of ZeRO. A search and a plan of given degrees cut by the same weights and the same recursion.
"""

from collections.abc import Mapping, Sequence

from autopar.cost_model.pricing import layout_of
from autopar.cost_model.shared_prices import SharedPrices
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import PlanError, did_you_mean
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.ir.stages import main_calls
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.pricing.stage_partition import partition


def choose_cuts(program: Program, works: ProgramWorks, degrees: Degrees, call_s: Sequence[float]) -> tuple[int, ...]:
    """The main calls before which stages begin, under given degrees. `call_s` are `call_seconds`."""
    if degrees.cut_at is not None:
        return cuts_at(program, degrees.cut_at)
    if sum(works.can_be_stage) < degrees.num_stages:
        count = sum(works.can_be_stage)
        remedy = f"use pp × virtual_stages of at most {count}" if count > 1 else "use pp = 1, with tp or dp instead"
        raise PlanError(
            f"{degrees.num_stages} pipeline stages (pp {degrees.pp} × virtual_stages {degrees.virtual_stages}) need as "
            f"many blocks with trained parameters, the model has {count}; {remedy}"
        )
    return fastest_cuts(works, call_s, degrees.num_stages)


def fastest_cuts(works: ProgramWorks, call_s: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """The cuts that make the slowest stage fastest."""
    return partition(call_s, num_stages, can_be_alone=works.can_be_stage)


def call_seconds(works: ProgramWorks, degrees: Degrees, on: Machinery) -> tuple[float, ...]:
    """Seconds of every main call on one rank for one micro-batch, forward and backward."""
    (passes,) = SharedPrices(works, layout_of(works, degrees), on.machine).passes
    return tuple(seconds_of_calls(works, passes))


def seconds_of_calls(works: ProgramWorks, passes: Mapping[str, tuple[float, float]]) -> list[float]:
    """Seconds of every main call, from each role's forward and both passes. A role of several calls is at the first."""
    return [passes[role][1] if role else 0.0 for role in works.calls]


def cuts_at(program: Program, paths: Sequence[str]) -> tuple[int, ...]:
    """The cuts before the first call of each module path. Raises `PlanError` naming an unknown path."""
    calls = [program.calls[i] for i in main_calls(program)]
    cuts = []
    for path in paths:
        at = next((k for k, call in enumerate(calls) if call.path == path or call.path.startswith(f"{path}.")), None)
        if at is None:
            known = sorted({call.path for call in calls})
            raise PlanError(f"cut_at {path!r}: no block of the model has this path; {did_you_mean(path, known)}")
        cuts.append(at)
    if any(b <= a for a, b in zip((0, *cuts), cuts, strict=False)):
        raise PlanError(
            f"cut_at {', '.join(paths)}: these are calls {cuts} of the model; name them in the model's order, each "
            "once, without the first call"
        )
    return tuple(cuts)


def cuts_like(program: Program, stage_of: Mapping[str, tuple[int, ...]], num_stages: int) -> tuple[int, ...]:
    """Cuts that leave every parameter where it is held: `stage_of` names the stages that hold it."""
    cuts, stage = [], 0
    for k, index in enumerate(main_calls(program)):
        held = [stage_of[str(a)] for a in program.calls[index].arguments if a in stage_of]
        common = set.intersection(*map(set, held)) if held else {stage}
        later = sorted(s for s in common if s >= stage)
        if not later:
            names = [str(a) for a in program.calls[index].arguments if a in stage_of and stage not in stage_of[str(a)]]
            raise PlanError(
                f"in this mode or shape {program.calls[index].path!r} of pipeline stage {stage} takes {names[0]!r}, "
                f"which stage {stage_of[names[0]][0]} holds; run this mode or shape without a pipeline"
            )
        cuts += [k] * (later[0] - stage)
        stage = later[0]
    if len(cuts) != num_stages - 1:
        raise PlanError(
            f"in this mode or shape the model uses {len(cuts) + 1} of {num_stages} pipeline stages; run it without a "
            "pipeline"
        )
    return tuple(cuts)
