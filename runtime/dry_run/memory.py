"""The memory of one rank in a step, by category. It is exact: it follows from the plan's storage and torch's autograd.

    parameters    shards between steps, padded as ZeRO pads them; a copy in every stage that takes a tied one. With a
                  precision they are float32 (`autopar.ir.precision`)
    gradients     after the step, in the layout and dtype of the parameters
    beside        gradients that add to the peak: in a step with one backward pass, this pass makes them while it frees
                  saved tensors, and few gradients exist where most tensors do
    optimizer     the state of the plan's optimizer (`autopar.ir.optimizers`)
    gathered      the most parameters that ZeRO holds whole at once, by the order of its gathers; with a
                  precision the copies of all other parameters in the dtype of computing
    whole         gradients that wait whole for their sum: of every group where ZeRO 1 accumulates or the schedule
                  splits the backward pass, else of the largest group
    buffers       the operand of the largest gather or reduce-scatter, which is a copy
    host          what the plan keeps in host memory instead: it is in no category of the device
    saved         what autograd keeps for backward of the micro-batches that are live at once under the schedule
    workspace     the most that lives besides in one micro-batch: temporaries of the loss, values recomputed in backward

Inputs of the batch and constants are not counted; allocators round up and keep what is free, which is not counted
either. "Live at once" follows the action list: a micro-batch from its forward pass to the last part of its backward
pass (`autopar.ir.schedules.registry`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from autopar.ir.offload import OPTIMIZER, PARAMETERS
from autopar.ir.optimizers import OwnPart, optimizer_named
from autopar.ir.program import hidden_parameters
from autopar.ir.schedules.registry import actions
from autopar.ir.stages import stages_by_parameter
from autopar.runtime.dry_run.rank_view import RankView
from autopar.runtime.dry_run.stage_run import StageRun
from autopar.runtime.dry_run.zero import groups_of, most_gathered_bytes
from autopar.runtime.model.tied_parameters import ranks_of_stages
from autopar.runtime.parameters.packed import by_model_parameter, joint_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank by category. All are on the device but `host_bytes`."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    whole_gradient_bytes: int
    buffer_bytes: int
    saved_bytes: int
    workspace_bytes: int
    gradients_beside_bytes: int
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All categories at once: an upper bound where their peaks are at different times."""
        state = self.parameter_bytes + self.gradients_beside_bytes + self.optimizer_bytes
        zero = self.gathered_bytes + self.whole_gradient_bytes + self.buffer_bytes
        return state + zero + self.saved_bytes + self.workspace_bytes


def memory_of(setting: RankView, runs: Mapping[int, StageRun]) -> RankMemory:
    """The memory of a rank, from one micro-batch of each of its stages."""
    degrees = setting.plan.degrees
    gathered, whole, largest = _copied_bytes(setting), 0, 0
    for stage in setting.own_stages:
        groups = groups_of(setting, stage, runs[stage.index])
        gathered += most_gathered_bytes(degrees, stage.index, groups)
        waits = [group.gradient_bytes for group in groups] or [0]
        splits = degrees.splits_backward
        accumulates = degrees.fsdp_stage == 1 and degrees.num_micro_batches > 1
        whole += sum(waits) if splits or accumulates else max(waits)
        largest = max(largest, *(group.whole_bytes for group in groups), *waits)
        if degrees.offloads(PARAMETERS):  # a shard on its way to the host or from it
            whole += max([group.stored_bytes for group in groups] or [0])
    state = optimizer_bytes(setting, runs)
    own, optimizer = trained(setting, runs), sum(state.values())
    parameters, gradients, host = _parameter_bytes(setting), gradient_bytes(setting, runs), 0
    if degrees.offloads(PARAMETERS):
        in_place = [name for name in own if not setting.is_sharded(name)]
        held = sum(setting.stored_bytes(name) for name in setting.held if setting.is_sharded(name))
        stays = sum(map(setting.stored_bytes, in_place))
        stepped = sum(state[name] for name in {setting.program.parameters[n].whole_name for n in in_place})
        host = held + gradients - stays + optimizer - stepped
        parameters, gradients, optimizer = parameters - held, stays, stepped
    elif degrees.offloads(OPTIMIZER):
        host, optimizer = trainable_bytes(setting) + sum(map(setting.gradient_bytes, own)) + optimizer, 0
    beside = gradients
    if degrees.pp == 1 and degrees.num_micro_batches == 1:
        beside = min(gradients, sum(run.gradient_peak_bytes - run.peak_bytes for run in runs.values()))
    return RankMemory(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        gathered_bytes=gathered,
        whole_gradient_bytes=whole,
        buffer_bytes=largest,
        saved_bytes=_saved_peak(setting, runs, lambda run: (run.saved_bytes, run.kept_bytes)),
        workspace_bytes=max(run.peak_bytes - run.saved_bytes for run in runs.values()),
        gradients_beside_bytes=beside,
        host_bytes=host + _saved_peak(setting, runs, lambda run: (run.moved_bytes, run.moved_bytes)),
    )


def optimizer_bytes(setting: RankView, runs: Mapping[int, StageRun]) -> dict[str, int]:
    """Bytes of the optimizer's state on a rank, by parameter of the model."""
    kind, hidden = optimizer_named(setting.plan.degrees.optimizer), hidden_parameters(setting.program)
    own, found = set(trained(setting, runs)), dict[str, int]()
    for whole, infos in by_model_parameter(setting.program):
        names = [info.name for info in infos if info.name in own]
        if names:
            part = OwnPart(
                shape=tuple(joint_of(infos).shape),
                num_elements=sum(map(setting.gradient_elements, names)),
                element_bytes=setting.stored_itemsize(names[0]),
                is_hidden=names[0] in hidden,
            )
            found[whole] = kind.held_bytes(part)
    return found


def trainable_bytes(setting: RankView) -> int:
    """Bytes of the parameters that an optimizer on the host updates: this rank's parts, without padding."""
    infos = setting.program.parameters
    return sum(setting.gradient_bytes(name) for name in set(setting.held) if infos[name].requires_grad)


def gradient_bytes(setting: RankView, runs: Mapping[int, StageRun]) -> int:
    """Bytes of gradients after the step. The buffer of a group stays while one of its gradients stays."""
    left, total = set(trained(setting, runs)), 0
    for stage in setting.own_stages:
        for group in groups_of(setting, stage, runs[stage.index]):
            if not left.isdisjoint(group.names) and group.gradient_bytes:
                reached = [name for name in group.names if name in runs[stage.index].gradients]
                total += sum(map(setting.stored_bytes, reached))
                left -= set(reached)
    return total + sum(map(setting.stored_bytes, left))


def _parameter_bytes(setting: RankView) -> int:
    unused = setting.program.unused if any(stage.index == 0 for stage in setting.own_stages) else ()
    return sum(map(setting.stored_bytes, [*setting.held, *unused]))


def _copied_bytes(setting: RankView) -> int:
    """Bytes of the copies of float32 weights in the dtype of computing, of parameters that FSDP2 does not gather."""
    infos, total = setting.program.parameters, 0
    for name in setting.held:
        if not setting.is_sharded(name) and infos[name].dtype.itemsize != setting.stored_itemsize(name):
            total += prod(setting.own_shape(name)) * infos[name].dtype.itemsize
    return total


def _saved_peak(setting: RankView, runs: Mapping[int, StageRun], sizes: Callable[[StageRun], tuple[int, int]]) -> int:
    """The most bytes that are kept for backward at once, over the order of this rank's passes."""
    degrees = setting.plan.degrees
    if degrees.pp == 1:
        return sum(sizes(run)[0] for run in runs.values())
    order = actions(degrees.schedule, degrees.pp, degrees.virtual_stages, degrees.micro_batches)
    live, most = 0, 0
    for action in order[setting.coordinates["pp"]]:
        stage, (saved, kept) = setting.stages[action.stage], sizes(runs[action.stage])
        if action.kind == "F":
            live += saved
        elif action.kind == "B":
            live -= saved
        elif setting.splits_backward(stage):
            live -= kept if action.kind == "W" else saved - kept
        elif (action.kind == "W") == (stage.index == 0):  # in one: the first stage last, others first
            live -= saved
        most = max(most, live)
    return most


def trained(setting: RankView, runs: Mapping[int, StageRun]) -> list[str]:
    """The parameters of this rank that have a gradient after the step, in the model's order."""
    reached = {name for run in runs.values() for name in run.gradients}
    ranks, held = holders(setting), set(setting.held)
    infos = setting.program.parameters
    return [n for n in infos if n in held and infos[n].requires_grad and (n in reached or len(ranks[n]) > 1)]


def holders(setting: RankView) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks that hold each parameter."""
    return ranks_of_stages(stages_by_parameter(setting.program, setting.stages), setting.plan.degrees)
