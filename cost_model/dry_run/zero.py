"""What ZeRO gathers in a step: the hooks of FSDP2 over the passes of a stage, set by `autopar.runtime.model.zero`.

Every call of a block that holds parameters is a group, gathered and summed at once; what several calls take is the
root's group. FSDP2 (torch.distributed.fsdp, `_fsdp_param_group.py`) gathers a group before it runs unless it is
gathered still; in backward it gathers the group before in the order of past forward passes ahead of time. Where several
forward passes ran before the first backward pass that order goes back beyond the micro-batch, and what is gathered
there is thrown away: one group in the first backward pass of every run of a schedule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cost_model.dry_run.rank_view import RankView
from autopar.cost_model.dry_run.stage_run import StageRun
from autopar.ir.degrees import Degrees
from autopar.ir.schedules.action import Action
from autopar.ir.schedules.registry import actions
from autopar.ir.stages import Stage, owners
from autopar.ir.storage import by_dtype

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
            of_experts = at is not None and setting.storages[name].is_of_experts
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
                flows=at == ROOT or stage.calls[at] in run.flows,
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


@dataclass(slots=True)
class Hooks:
    """State of FSDP2 in one stage."""

    groups: Sequence[ParameterGroup]
    degrees: Degrees
    gathered: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)  # gathered ahead of time, not yet used
    order: list[int] = field(default_factory=list)
    most_bytes: int = 0

    def gather(self, at: int, *, ahead: bool = False) -> None:
        if at not in self.gathered and at not in self.ahead:
            self.ahead.add(at)
        if not ahead and at in self.ahead:
            self.ahead.remove(at)
            self.gathered.add(at)
        held = sum(self.groups[g].whole_bytes for g in self.gathered | self.ahead)
        self.most_bytes = max(self.most_bytes, held)

    def forward(self, *, keeps: bool) -> None:
        root = [at for at, group in enumerate(self.groups) if group.call == ROOT]
        calls = [at for at, group in enumerate(self.groups) if group.call != ROOT]
        for at in (*root, *calls):
            self.gather(at)
            if not keeps and at not in root:
                self.gathered.discard(at)
        self.order += [*calls, *root]

    def backward(self, *, is_last: bool) -> None:
        root = [at for at, group in enumerate(self.groups) if group.call == ROOT]
        calls = [at for at, group in enumerate(self.groups) if group.call != ROOT and group.flows]
        for at in (*root, *reversed(calls)):
            self.gather(at)
            uses = [k for k, one in enumerate(self.order) if one == at]
            if uses and uses[-1]:
                self.gather(self.order[uses[-1] - 1], ahead=True)
            if at not in root:
                self.after_backward(at, is_last=is_last)
        for at in {*root, *range(len(self.groups))} - set(calls):
            self.after_backward(at, is_last=is_last)
        self.order.clear()
        self.ahead.clear()

    def after_backward(self, at: int, *, is_last: bool) -> None:
        if self.degrees.fsdp_stage == 3 or is_last:
            self.gathered.discard(at)

    def step(self, stage: int) -> None:
        """All passes of a stage in one step."""
        splits, stage_of_zero = self.degrees.splits_backward, self.degrees.fsdp_stage
        runs = list(stage_passes(self.degrees, stage))
        for number, order in enumerate(runs):
            last = max(k for k, action in enumerate(order) if action.kind != "F")
            for k, action in enumerate(order):
                if action.kind == "F":
                    self.forward(keeps=stage_of_zero < 3 or splits)
                elif not splits:  # gradients stay whole until the step's end
                    self.backward(is_last=k == last and number == len(runs) - 1)


def most_gathered_bytes(setting: RankView, stage: Stage, groups: Sequence[ParameterGroup]) -> int:
    """Bytes of the most parameters of a stage that are gathered at once."""
    hooks = Hooks(groups, setting.plan.degrees)
    if groups:
        hooks.step(stage.index)
    return hooks.most_bytes
