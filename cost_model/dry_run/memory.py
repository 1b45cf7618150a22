"""The memory of one rank in a step, by category. It is exact: it follows from the plan's storage and torch's autograd.

    parameters    shards between steps, padded as ZeRO pads them; a copy in every stage that takes a tied one. With a
                  precision they are float32 (`autopar.ir.precision`)
    gradients     after the step, in the layout and dtype of the parameters
    optimizer     Adam's two moments in the parameter's dtype, and its count of steps, 4 bytes a parameter
    gathered      the most parameters that ZeRO holds whole at once, by the order of gathers (zero_traffic); with a
                  precision the copies of all other parameters in the dtype of computing
    whole         gradients that wait whole for their sum: of every group where ZeRO 1 accumulates or the schedule
                  splits the backward pass, else of the largest group
    buffers       the operand of the largest gather or reduce-scatter, which is a copy
    saved         what autograd keeps for backward of the micro-batches that are live at once under the schedule
    workspace     the most that lives besides in one micro-batch: temporaries of the loss, values recomputed in backward

Inputs of the batch and constants are not counted; allocators round up and keep what is free, which is not counted
either. "Live at once" follows the action list: a micro-batch from its forward pass to the last part of its backward
pass (`autopar.ir.schedules.registry`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autopar.capture.analysis import Analysis
from autopar.cost_model.dry_run.ledger import Ledger
from autopar.cost_model.dry_run.rank_view import RankView
from autopar.cost_model.dry_run.stage_run import StageRun, run_stages
from autopar.cost_model.dry_run.traffic import local_gradient_elements, trained
from autopar.cost_model.dry_run.zero import groups_of, is_sharded, padded_elements, zero_step
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.schedules.registry import actions

_NUM_MOMENTS = 2  # Adam's, Kingma and Ba 2015
_STEP_BYTES = 4  # torch.optim counts steps in a float32 of each parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank by category."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    whole_gradient_bytes: int
    buffer_bytes: int
    saved_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """All categories at once: an upper bound where their peaks are at different times."""
        state = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        zero = self.gathered_bytes + self.whole_gradient_bytes + self.buffer_bytes
        return state + zero + self.saved_bytes + self.workspace_bytes


def rank_memory(program: Program, analysis: Analysis, plan: Plan, rank: int = 0, *, device: str = "cpu") -> RankMemory:
    """The memory of a rank in a step of `plan`. `analysis` is the analysis of the program on the plan's mesh."""
    setting = RankView(program, analysis, plan, rank)
    return memory_of(setting, run_stages(setting, device))


def memory_of(setting: RankView, runs: Mapping[int, StageRun]) -> RankMemory:
    """The memory of a rank, from one micro-batch of each of its stages."""
    degrees = setting.plan.degrees
    gathered, whole, largest = _copied_bytes(setting), 0, 0
    for stage in setting.own_stages:
        groups = groups_of(setting, stage, runs[stage.index])
        gathered += zero_step(setting, stage, groups, Ledger())
        waits = [group.gradient_bytes for group in groups] or [0]
        splits = degrees.splits_backward
        accumulates = degrees.zero == 1 and degrees.num_micro_batches > 1
        whole += sum(waits) if splits or accumulates else max(waits)
        largest = max(largest, *(group.shard_bytes * degrees.dp_shard for group in groups), *waits)
    own = trained(setting, runs)
    optimizer = sum(
        _NUM_MOMENTS * local_gradient_elements(setting, name) * setting.stored_itemsize(name) + _STEP_BYTES
        for name in own
    )
    return RankMemory(
        parameter_bytes=_parameter_bytes(setting),
        gradient_bytes=gradient_bytes(setting, runs),
        optimizer_bytes=optimizer,
        gathered_bytes=gathered,
        whole_gradient_bytes=whole,
        buffer_bytes=largest,
        saved_bytes=_saved_peak(setting, runs),
        workspace_bytes=max(run.peak_bytes - run.saved_bytes for run in runs.values()),
    )


def gradient_bytes(setting: RankView, runs: Mapping[int, StageRun]) -> int:
    """Bytes of the gradients that a rank holds after the step.

    ZeRO sums the gradients of a group into one buffer, which stays while one of these gradients stays. The gradient of
    a tied parameter is given to the first stage of this rank that takes it.
    """
    left, total = set(trained(setting, runs)), 0
    for stage in setting.own_stages:
        for group in groups_of(setting, stage, runs[stage.index]):
            if not left.isdisjoint(group.names) and group.gradient_bytes:
                reached = [name for name in group.names if name in runs[stage.index].gradients]
                total += sum(_stored_bytes(setting, name) for name in reached)
                left -= set(reached)
    return total + sum(_stored_bytes(setting, name) for name in left)


def _stored_bytes(setting: RankView, name: str) -> int:
    """Bytes of this rank's part of a parameter between steps, with ZeRO's padding."""
    item = setting.stored_itemsize(name)
    if is_sharded(setting, name):
        return padded_elements(setting, name) // setting.plan.degrees.dp_shard * item
    return prod(setting.own_shape(name)) * item


def _parameter_bytes(setting: RankView) -> int:
    stored = sum(_stored_bytes(setting, name) for stage in setting.own_stages for name in stage.parameters)
    unused = setting.program.unused.values() if any(stage.index == 0 for stage in setting.own_stages) else ()
    return stored + sum(info.num_elements * setting.stored_itemsize(info.name) for info in unused)


def _copied_bytes(setting: RankView) -> int:
    """Bytes of the copies of float32 weights in the dtype of computing, of parameters that FSDP2 does not gather."""
    infos, total = setting.program.parameters, 0
    for name in (name for stage in setting.own_stages for name in stage.parameters):
        if not is_sharded(setting, name) and infos[name].dtype.itemsize != setting.stored_itemsize(name):
            total += prod(setting.own_shape(name)) * infos[name].dtype.itemsize
    return total


def _saved_peak(setting: RankView, runs: Mapping[int, StageRun]) -> int:
    """The most bytes that are kept for backward at once, over the order of this rank's passes."""
    degrees = setting.plan.degrees
    if degrees.pp == 1:
        return sum(run.saved_bytes for run in runs.values())
    order = actions(degrees.schedule, degrees.pp, degrees.virtual_stages, degrees.micro_batches)
    live, most = 0, 0
    for action in order[setting.coordinates["pp"]]:
        stage, run = setting.stages[action.stage], runs[action.stage]
        if action.kind == "F":
            live += run.saved_bytes
        elif action.kind == "B":
            live -= run.saved_bytes
        elif setting.splits_backward(stage):
            live -= run.kept_bytes if action.kind == "W" else run.saved_bytes - run.kept_bytes
        elif (action.kind == "W") == (stage.index == 0):  # in one: the first stage last, others first
            live -= run.saved_bytes
        most = max(most, live)
    return most
