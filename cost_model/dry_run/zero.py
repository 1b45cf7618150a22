"""What ZeRO sends in a step: the hooks of FSDP2 over the passes of a stage, as `autopar.runtime.model.zero` sets them.

Every call of a block that holds parameters is a group, gathered and summed at once; what several calls take is the
root's group. FSDP2 (torch.distributed.fsdp, `_fsdp_param_group.py`) gathers a group before it runs unless it is
gathered still; in backward it gathers the group before in the order of past forward passes ahead of time. Where several
forward passes ran before the first backward pass that order goes back beyond the micro-batch, and what is gathered
there is thrown away: one group in the first backward pass of every run of a schedule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cost_model.dry_run.ledger import Ledger, collective
from autopar.cost_model.dry_run.rank_view import RankView
from autopar.cost_model.dry_run.shards import is_sharded, padded_elements, shard_elements
from autopar.cost_model.dry_run.stage_run import StageRun
from autopar.ir.degrees import Degrees
from autopar.ir.schedules.action import Action
from autopar.ir.schedules.registry import actions
from autopar.ir.stages import Stage, owners
from autopar.ir.storage import by_dtype
from autopar.lowering.conversions import Collective

ROOT = -1
EXPERTS_NAME = "dp_of_experts"  # of the group of all ranks that hold the same experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that are gathered at once: `call` is their place among the stage's calls, `ROOT` for shared ones.

    They are sharded over `ranks`. Experts that `ep` splits are a group of their own.

    Bytes of one rank: the operand of a gather is its padded shard in the dtype of computing. Between steps, and on its
    way from the host, the shard has `stored_bytes`. The operand of a reduce-scatter is the padded whole of the
    parameters with a gradient, in the dtype in which gradients are summed. `own_gradient_bytes` is this rank's part of
    their sums, without padding.
    """

    call: int
    names: tuple[str, ...]
    shard_bytes: int
    stored_bytes: int
    gradient_bytes: int
    flows: bool
    own_gradient_bytes: int = 0
    ranks: int = 1
    of_experts: bool = False

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered parameters, with padding."""
        return self.shard_bytes * self.ranks


def data_name(degrees: Degrees) -> str:
    """The name of the group of all ranks that hold the same parameters."""
    if degrees.cp > 1:
        return "dp_cp"
    return "dp" if degrees.ep == 1 else "dp_ep"


def groups_of(setting: RankView, stage: Stage, run: StageRun) -> list[ParameterGroup]:
    """A stage's groups in the order in which forward passes end: calls first, the root's last."""
    by_call: dict[tuple[int, bool], list[str]] = {}
    for name, at in owners(setting.program, stage.calls).items():
        if is_sharded(setting, name):
            of_experts = at is not None and setting.storages[name].is_of_experts
            by_call.setdefault((ROOT if at is None else at, of_experts), []).append(name)
    order = [*sorted(key for key in by_call if key[0] != ROOT), *(key for key in by_call if key[0] == ROOT)]
    found = []
    every = ((key, names) for key in order for names in by_dtype(by_call[key], setting.program.parameters))
    for (at, of_experts), names in every:
        infos, degrees = setting.program.parameters, setting.plan.degrees
        ranks = degrees.expert_shard_ranks if of_experts else degrees.shard_ranks
        elements = {n: padded_elements(setting, n) for n in names}
        found.append(
            ParameterGroup(
                call=at,
                names=tuple(names),
                shard_bytes=sum(elements[n] * infos[n].dtype.itemsize for n in names) // ranks,
                stored_bytes=sum(elements[n] * setting.stored_itemsize(n) for n in names) // ranks,
                gradient_bytes=sum(elements[n] * setting.summed_itemsize(n) for n in names if n in run.gradients),
                own_gradient_bytes=sum(
                    shard_elements(setting, n) * setting.stored_itemsize(n) for n in names if n in run.gradients
                ),
                flows=at == ROOT or stage.calls[at] in run.flows,
                ranks=ranks,
                of_experts=of_experts,
            )
        )
    return found


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroStep:
    """Bytes of one stage in one step: the most parameters that are gathered at once, and what gathers and sums move
    between host and device if shards are on the host."""

    most_bytes: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0


@dataclass(slots=True)
class _Hooks:
    """State of FSDP2 in one stage, and its traffic."""

    groups: Sequence[ParameterGroup]
    degrees: Degrees
    ledger: Ledger
    gathered: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)  # gathered ahead of time, not yet used
    order: list[int] = field(default_factory=list)
    most_bytes: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0

    def _send(self, kind: Collective, operand_bytes: int, at: int) -> None:
        name = data_name(self.degrees) if self.degrees.dp_replicate == 1 else "dp_shard"
        if self.groups[at].of_experts:
            name = EXPERTS_NAME if self.degrees.dp_replicate == 1 else "dp_experts"
        if self.groups[at].ranks > 1:
            self.ledger.add(name, kind, collective(kind, self.groups[at].ranks, operand_bytes))

    def gather(self, at: int, *, ahead: bool = False) -> None:
        if at not in self.gathered and at not in self.ahead:
            self._send("all_gather", self.groups[at].shard_bytes, at)
            self.to_device_bytes += self.groups[at].stored_bytes * (self.groups[at].ranks > 1)
            self.ahead.add(at)
        if not ahead and at in self.ahead:
            # one rank gathers nothing, and copies when the values are used
            self.to_device_bytes += self.groups[at].stored_bytes * (self.groups[at].ranks == 1)
            self.ahead.remove(at)
            self.gathered.add(at)
        held = sum(self.groups[g].whole_bytes for g in self.gathered | self.ahead)
        self.most_bytes = max(self.most_bytes, held)

    def reduce(self, at: int) -> None:
        operand = self.groups[at].gradient_bytes
        if operand:
            self._send("reduce_scatter", operand, at)
            self.to_host_bytes += self.groups[at].own_gradient_bytes
            if self.degrees.dp_replicate > 1:
                part = collective("all_reduce", self.degrees.dp_replicate, operand // self.groups[at].ranks)
                self.ledger.add("dp_replicate", "all_reduce", part)

    def forward(self, *, keeps: bool) -> None:
        root = [at for at, group in enumerate(self.groups) if group.call == ROOT]
        calls = [at for at, group in enumerate(self.groups) if group.call != ROOT]
        for at in (*root, *calls):
            self.gather(at)
            if not keeps and at not in root:
                self.gathered.discard(at)
        self.order += [*calls, *root]

    def backward(self, *, reshards: bool, reduces: bool) -> None:
        root = [at for at, group in enumerate(self.groups) if group.call == ROOT]
        calls = [at for at, group in enumerate(self.groups) if group.call != ROOT and group.flows]
        for at in (*root, *reversed(calls)):
            self.gather(at)
            uses = [k for k, one in enumerate(self.order) if one == at]
            if uses and uses[-1]:
                self.gather(self.order[uses[-1] - 1], ahead=True)
            if at not in root:
                self._after(at, reshards=reshards, reduces=reduces)
        for at in {*root, *range(len(self.groups))} - set(calls):
            self._after(at, reshards=reshards, reduces=reduces)
        self.order.clear()
        self.ahead.clear()

    def _after(self, at: int, *, reshards: bool, reduces: bool) -> None:
        if reshards:
            self.gathered.discard(at)
        if reduces:
            self.reduce(at)


def zero_step(setting: RankView, stage: Stage, groups: Sequence[ParameterGroup], ledger: Ledger) -> ZeroStep:
    """Write down what ZeRO sends for a stage in one step."""
    degrees = setting.plan.degrees
    if not groups:
        return ZeroStep()
    hooks = _Hooks(groups, degrees, ledger)
    splits, stage_of_zero = degrees.splits_backward, degrees.fsdp_stage
    runs = list(stage_passes(degrees, stage.index))
    for number, order in enumerate(runs):
        last = max(k for k, action in enumerate(order) if action.kind != "F")
        for k, action in enumerate(order):
            is_last = k == last and number == len(runs) - 1
            if action.kind == "F":
                hooks.forward(keeps=stage_of_zero < 3 or splits)
            elif not splits:
                hooks.backward(reshards=stage_of_zero == 3 or is_last, reduces=stage_of_zero >= 2 or is_last)
    if splits:  # gradients stay whole until the step's end
        for at in range(len(groups)):
            hooks.reduce(at)
    return ZeroStep(
        most_bytes=hooks.most_bytes, to_device_bytes=hooks.to_device_bytes, to_host_bytes=hooks.to_host_bytes
    )
