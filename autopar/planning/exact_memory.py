"""An estimate whose memory is counted, not priced by formulas: what `dry_run.memory` counts of a plan.

The count runs one micro-batch of every stage on tensors without data: a tenth of a second per layer or less.
docs/estimate.md compares both.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.cost_model.estimate import Estimate
from autopar.cost_model.interval import DEFAULT_CHANCE, chance_of_fitting
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.parts import MEMORY
from autopar.errors import InputError
from autopar.ir.plan import Plan
from autopar.ir.program import Program

if TYPE_CHECKING:
    from autopar.runtime.dry_run.memory import RankMemory

WAITING, BUFFERS, WORKSPACE = (
    "gradients that wait for their sum",
    "buffers of collectives",
    "workspace of a micro-batch",
)
KERNELS = "exact memory: attention saves its output and one sum per query, as torch's CPU kernel does"


def fullest_rank(program: Program, plan: Plan) -> "RankMemory":
    """The fullest pipeline rank, of those that are first elsewhere: uneven parts are largest there."""
    from autopar.runtime.dry_run.memory import memory_of  # the runtime's imports take long
    from autopar.runtime.dry_run.rank_view import rank_view
    from autopar.runtime.dry_run.stage_run import run_stage

    degrees = plan.degrees
    wanted = None if degrees.micro_batch is None else degrees.micro_batch * degrees.dp
    if wanted is not None and program.batch is not None and program.batch != wanted:
        raise InputError(
            f"exact memory needs the model captured at the plan's micro-batch, {wanted} sequences over all "
            f"data-parallel ranks; it was captured at {program.batch}"
        )
    ranks = [rank_view(program, plan, index * degrees.strides["pp"]) for index in range(degrees.pp)]
    memories = [memory_of(rank, {stage.index: run_stage(rank, stage) for stage in rank.own_stages}) for rank in ranks]
    return max(memories, key=lambda memory: memory.total_bytes)


def with_exact_memory(estimate: Estimate, held: "RankMemory") -> Estimate:
    """The estimate with counted bytes. The reserve and the allocator's cache keep their assumed values."""
    parts = dict.fromkeys(MEMORY.values(), 0.0) | {
        MEMORY["parameters"]: float(held.parameter_bytes),
        MEMORY["gradients"]: float(held.gradients_beside_bytes),
        WAITING: float(held.whole_gradient_bytes),
        MEMORY["optimizer state"]: float(held.optimizer_bytes),
        MEMORY["gathered"]: float(held.gathered_bytes),
        BUFFERS: float(held.buffer_bytes),
        MEMORY["activations"]: float(held.saved_bytes),
        WORKSPACE: float(held.workspace_bytes),
    }
    parts[MEMORY["cache"]] = mechanisms().allocator_cache * sum(parts.values())
    parts[MEMORY["reserve"]] = estimate.memory_bytes[MEMORY["reserve"]]
    peak = sum(parts.values())
    low, high = (peak * bound / estimate.peak_bytes for bound in estimate.peak_interval_bytes)
    return replace(
        estimate,
        memory_bytes=parts,
        peak_bytes=peak,
        peak_interval_bytes=(low, high),
        chance_of_fitting=(chance := chance_of_fitting(peak, estimate.device_bytes, (low, high))),
        fits=chance >= DEFAULT_CHANCE,
        host_bytes=float(held.host_bytes),
        assumptions=(*estimate.assumptions, KERNELS),
    )
