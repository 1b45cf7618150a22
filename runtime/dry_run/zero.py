"""What ZeRO gathers in a step: the hooks of FSDP2 over the passes of a stage, set by `autopar.runtime.model.zero`.

Every call of a block that holds parameters is a group, gathered and summed at once; what several calls take is the
root's group. FSDP2 (torch.distributed.fsdp, `_fsdp_param_group.py`) gathers a group before it runs unless it is
gathered still; in backward it gathers the group before in the order of past forward passes ahead of time. Where several
forward passes ran before the first backward pass that order goes back beyond the micro-batch, and what is gathered
there is thrown away: one group in the first backward pass of every run of a schedule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.degrees import Degrees
from autopar.ir.schedules.action import Action
from autopar.ir.schedules.registry import actions
from autopar.ir.stages import Stage, owners
from autopar.ir.storage import by_dtype
from autopar.runtime.dry_run.rank_view import RankView
from autopar.runtime.dry_run.stage_run import StageRun

ROOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that are gathered at once, and their bytes on one rank. Experts that `ep` splits are apart."""

    call: int  # the place among the stage's calls, `ROOT` for shared ones
    names: tuple[str, ...]
    shard_bytes: int  # the operand of a gather: the padded shard in the dtype of computing
    stored_bytes: int  # the shard between steps, and on its way from the host
    gradient_bytes: int  # the operand of a reduce-scatter: padded and whole, in the dtype of sums
    flows: bool
    ranks: int = 1
    of_experts: bool = False

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered parameters, with padding."""
        return self.shard_bytes * self.ranks


def groups_of(setting: RankView, stage: Stage, run: StageRun) -> list[ParameterGroup]:
    """A stage's groups in the order in which forward passes end: calls first, the root's last."""
    by_call: dict[tuple[int, bool], list[str]] = {}
    for name, at in owners(setting.program, stage.calls).items():
        if setting.is_sharded(name):
            of_experts = at is not None and setting.placements[name].is_of_experts
            by_call.setdefault((ROOT if at is None else at, of_experts), []).append(name)
    order = [*sorted(key for key in by_call if key[0] != ROOT), *(key for key in by_call if key[0] == ROOT)]
    infos, degrees, groups = setting.program.parameters, setting.plan.degrees, list[ParameterGroup]()
    for (at, of_experts), names in ((key, names) for key in order for names in by_dtype(by_call[key], infos)):
        ranks = degrees.expert_shard_ranks if of_experts else degrees.shard_ranks
        elements = {n: setting.shard_elements(n, padded=True) for n in names}
        summed = sum(elements[n] * setting.summed_itemsize(n) for n in names if n in run.gradients)
        groups.append(
            ParameterGroup(
                call=at,
                names=tuple(names),
                shard_bytes=sum(elements[n] * infos[n].dtype.itemsize for n in names),
                stored_bytes=sum(map(setting.stored_bytes, names)),
                gradient_bytes=summed * ranks,
                flows=at == ROOT or names[0] in run.flows,
                ranks=ranks,
                of_experts=of_experts,
            )
        )
    return groups


def stage_passes(degrees: Degrees, stage: int) -> Iterator[list[Action]]:
    """Per run of the schedule, the passes of one stage in order; without a pipeline forward and backward in turn."""
    if degrees.pp == 1:
        both = [[Action(0, "F", m), Action(0, "B", m)] for m in range(degrees.num_micro_batches)]
        yield [action for pair in both for action in pair]
        return
    order = actions(degrees.schedule, degrees.pp, degrees.virtual_stages, degrees.micro_batches)
    own = [a for a in order[degrees.rank_of_stage(stage)] if a.stage == stage]
    for _ in range(degrees.accumulate):
        yield own


def most_gathered_bytes(degrees: Degrees, stage: int, groups: Sequence[ParameterGroup]) -> int:
    """Bytes of the most parameters of a stage that are gathered at once: all, but under ZeRO 3 calls in turn."""
    shared = {at for at, group in enumerate(groups) if group.call == ROOT}
    if degrees.fsdp_stage < 3 or degrees.splits_backward or len(shared) == len(groups):
        return sum(group.whole_bytes for group in groups)
    passes = "".join(action.kind for action in next(stage_passes(degrees, stage)))
    flowing = [at for at, group in enumerate(groups) if at not in shared and group.flows]
    held, most = set(shared), max(group.whole_bytes for group in groups if group.call != ROOT)
    most += sum(groups[at].whole_bytes for at in shared)
    for at in (*sorted(shared), *reversed(flowing)):
        held.add(at)
        if at or "FF" in passes:
            held.add((at - 1) % len(groups))  # ahead of time
        most = max(most, sum(groups[k].whole_bytes for k in held))
        held -= {at} - shared
    return most
