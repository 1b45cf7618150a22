"""The traffic of one rank in one `forward_backward`: calls and bytes of every collective by mesh dimension.

    part         sends                                  mesh dimension
    comparison   comparison of ranks before the step    all ranks
    denominator  the loss's denominator                 of its conversions
    blocks       conversions of every block call        of the conversion
    zero         ZeRO's gathers and sums                dp, or dp_shard and dp_replicate
    replicated   gradients of replicated parameters     of the replication
    tied         gradients of tied parameters           pp
    messages     messages between stages                pp ("send", "recv")
    loss         the loss, from the last stage          pp

Denominators and blocks send once for each micro-batch. Blocks send in the forward, the recomputed and the backward
pass. Messages go each way for each micro-batch. ZeRO's number depends on the ZeRO stage and the schedule
. Every other part sends once in a step, the gradients in buckets.

Clipping, the optimizer and evaluation are no part of a step. The bytes of a collective are the bytes of this rank's
operand (`CollectiveTotal`). The bytes of a message are the bytes of its tensor.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from autopar._torch import private
from autopar.capture.nodes import value_infos
from autopar.cost_model.machine.collectives import sent_bytes
from autopar.ir.degrees import Degrees
from autopar.ir.offload import OPTIMIZER, PARAMETERS
from autopar.ir.precision import is_low, summed_dtype
from autopar.ir.sharding import owned_by
from autopar.ir.stages import Stage, needs_denominator
from autopar.ir.storage import buckets
from autopar.lowering.conversions import Collective
from autopar.runtime.dry_run.memory import holders, trainable_bytes, trained
from autopar.runtime.dry_run.rank_view import RankView, SilentDim
from autopar.runtime.dry_run.stage_run import StageRun, StageRunner
from autopar.runtime.dry_run.zero import ROOT, ParameterGroup, groups_of, stage_passes

EXPERTS_NAME = "dp_of_experts"  # of the group of all ranks that hold the same experts
ALL_RANKS, PIPELINE = "all ranks", "pp"
StepPart = Literal["comparison", "denominator", "blocks", "zero", "messages", "loss", "tied", "replicated"]
_AGREEMENT_BYTES, _AGREEMENT_BYTES_PER_INPUT = 56, 16
_WIDE_LOSS_BYTES = 4  # losses of 16 bits are summed in float32


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """Calls of one kind over one mesh dimension, bytes of their operands, and bytes that a rank sends under rings."""

    calls: int = 0
    bytes: int = 0
    sent_bytes: float = 0.0

    def __add__(self, other: "CollectiveTotal") -> "CollectiveTotal":
        return CollectiveTotal(self.calls + other.calls, self.bytes + other.bytes, self.sent_bytes + other.sent_bytes)

    def __mul__(self, times: int) -> "CollectiveTotal":
        return CollectiveTotal(self.calls * times, self.bytes * times, self.sent_bytes * times)


def collective(kind: Collective, ranks: int, operand_bytes: int) -> CollectiveTotal:
    """One collective of a rank that puts in so many bytes."""
    whole = operand_bytes * ranks if kind in ("all_gather", "all_to_all", "exchange", "shift") else operand_bytes
    return CollectiveTotal(1, operand_bytes, sent_bytes(kind, whole, ranks))


Key = tuple[str, str]  # mesh dimension, kind
Sends = Mapping[Key, CollectiveTotal]


class Ledger(dict[Key, CollectiveTotal]):
    """The recorded collectives, summed by (mesh dimension, kind)."""

    def add(self, mesh_dim: str, kind: str, traffic: CollectiveTotal, times: int = 1) -> None:
        if times and traffic.calls:
            self[mesh_dim, kind] = self.get((mesh_dim, kind), CollectiveTotal()) + traffic * times

    def add_all(self, sends: Sends, times: int = 1) -> None:
        for key, traffic in sends.items():
            self.add(*key, traffic, times)

    def take(self) -> dict[Key, CollectiveTotal]:
        """The entries since the last call."""
        return {key: self.pop(key) for key in list(self)}


_KINDS: dict[str, Collective] = {"all_reduce": "all_reduce", "all_gather": "all_gather", "exchange": "exchange"}
_KINDS |= {"reduce_scatter": "reduce_scatter", "shift": "shift", "all_to_all": "all_to_all"}
_KINDS["all_to_all_rows"] = "all_to_all"


@dataclass(frozen=True, eq=False, repr=False)
class PricedDim(SilentDim):
    """A mesh dimension of generated code that writes its collectives down."""

    ledger: Ledger

    def __getattribute__(self, name: str) -> Any:
        kind, made = _KINDS.get(name.removeprefix("start_")), super().__getattribute__(name)
        if kind is None:
            return made

        def noted(x: torch.Tensor, *others: Any) -> Any:
            self.ledger.add(self.name, kind, collective(kind, self.degree, x.numel() * x.element_size()))
            return made(x, *others)

        return noted


@dataclass(frozen=True, eq=False, kw_only=True)
class StageTraffic(StageRun):
    forward: Sends
    backward: Sends
    backward_in_parts: Sends


class _CountedRun(StageRunner):
    def __init__(self, setting: RankView) -> None:
        self.ledger, self.sends, mesh = Ledger(), list[Sends](), setting.mesh
        dims = {n: PricedDim(n, d.degree, d.group, d.coordinate, d.stride, self.ledger) for n, d in mesh.dims.items()}
        super().__init__(replace(setting, mesh=replace(mesh, dims=dims)))

    def forward(self, *given: Any) -> list[torch.Tensor]:
        found = super().forward(*given)
        self.sends.append(self.ledger.take())
        return found

    def micro_batch(self, stage: Stage, *, in_parts: bool = False) -> StageRun:
        run = super().micro_batch(stage, in_parts=in_parts)
        self.sends.append(self.ledger.take())
        return run


def run_stage(setting: RankView, stage: Stage) -> StageTraffic:
    """As the product's, with what the stage sends: once more in parts where the schedule has it so."""
    with private.fake_tensors():
        run = _CountedRun(setting)
        memory = vars(run.stage(stage))
    forward, backward, *_, in_parts = (*run.sends, {}) if len(run.sends) == 2 else run.sends
    return StageTraffic(**memory, forward=forward, backward=backward, backward_in_parts=in_parts)


def run_stages(setting: RankView) -> dict[int, StageTraffic]:
    """One micro-batch of each stage of the rank, by the stage's number."""
    return {stage.index: run_stage(setting, stage) for stage in setting.own_stages}


def data_name(degrees: Degrees) -> str:
    """The name of the group of all ranks that hold the same parameters."""
    return "dp_cp" if degrees.cp > 1 else "dp" if degrees.ep == 1 else "dp_ep"


@dataclass
class ZeroTraffic:
    """What ZeRO sends for a stage, by the state of FSDP2: `sums` counts the sums of each group."""

    groups: Sequence[ParameterGroup]
    degrees: Degrees
    ledger: Ledger = field(default_factory=Ledger)
    sums: Counter[int] = field(default_factory=Counter)
    to_device_bytes: int = 0
    gathered: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)  # gathered ahead of time, not yet used
    passes: int = 0  # forward, since the last backward pass

    def _send(self, kind: Collective, operand_bytes: int, at: int) -> None:
        name = data_name(self.degrees) if self.degrees.dp_replicate == 1 else "dp_shard"
        if self.groups[at].of_experts:
            name = EXPERTS_NAME if self.degrees.dp_replicate == 1 else "dp_experts"
        if self.groups[at].ranks > 1:
            self.ledger.add(name, kind, collective(kind, self.groups[at].ranks, operand_bytes))

    def gather(self, at: int, *, ahead: bool = False) -> None:
        group, is_new = self.groups[at], at not in self.gathered and at not in self.ahead
        if is_new:
            self._send("all_gather", group.shard_bytes, at)
        # one rank gathers nothing, and copies when the values are used
        copies = is_new if group.ranks > 1 else not ahead and (is_new or at in self.ahead)
        self.to_device_bytes += group.stored_bytes * copies
        if not ahead:
            self.ahead.discard(at)
            self.gathered.add(at)
        elif is_new:
            self.ahead.add(at)

    def forward(self, root: list[int], *, keeps: bool) -> None:
        for at in (*root, *(k for k in range(len(self.groups)) if k not in root)):
            self.gather(at)
            if not keeps and at not in root:
                self.gathered.discard(at)
        self.passes += 1

    def backward(self, root: list[int], *, is_last: bool) -> None:
        calls = [at for at, group in enumerate(self.groups) if at not in root and group.flows]
        for at in (*root, *reversed(calls)):
            self.gather(at)
            if at or self.passes > 1:
                self.gather((at - 1) % len(self.groups), ahead=True)
            if at not in root:
                self.after_backward(at, is_last=is_last)
        for at in {*root, *range(len(self.groups))} - set(calls):
            self.after_backward(at, is_last=is_last)
        self.passes = 0
        self.ahead.clear()

    def reduce(self, at: int) -> None:
        operand, copies = self.groups[at].gradient_bytes, self.degrees.dp_replicate
        if operand:
            self._send("reduce_scatter", operand, at)
            self.sums[at] += 1
            if copies > 1:
                part = operand // self.groups[at].ranks
                self.ledger.add("dp_replicate", "all_reduce", collective("all_reduce", copies, part))

    def after_backward(self, at: int, *, is_last: bool) -> None:
        if self.degrees.fsdp_stage == 3 or is_last:
            self.gathered.discard(at)
        if self.degrees.fsdp_stage >= 2 or is_last:
            self.reduce(at)

    def step(self, stage: int) -> None:
        """All passes of a stage in one step."""
        splits, root = self.degrees.splits_backward, [k for k, g in enumerate(self.groups) if g.call == ROOT]
        runs = list(stage_passes(self.degrees, stage))
        for number, order in enumerate(runs, 1):
            for k, action in enumerate(order, 1):
                if action.kind == "F":
                    self.forward(root, keeps=self.degrees.fsdp_stage < 3 or splits)
                elif not splits:  # gradients stay whole until the step's end
                    self.backward(root, is_last=k == len(order) and number == len(runs))


def zero_step(degrees: Degrees, stage: int, groups: Sequence[ParameterGroup], ledger: Ledger) -> ZeroTraffic:
    """Write down what ZeRO sends for a stage in one step."""
    hooks = ZeroTraffic(groups, degrees, ledger=ledger)
    hooks.step(stage)
    for at in range(len(groups)) if degrees.splits_backward else ():  # gradients stay whole until the step's end
        hooks.reduce(at)
    return hooks


def sends_of(setting: RankView, runs: Mapping[int, StageTraffic]) -> Sends:
    """The traffic of a rank in one step, by (mesh dimension, kind), from one micro-batch of each of its stages.

    A mesh dimension is one of the plan, a joined one (``tp0_tp1``), ``pp`` or ``all ranks``. If ``dp_shard`` and
    ``dp_replicate`` are both above 1, they are two dimensions.
    """
    ledger = Ledger()
    for part in parts_of_step(setting, runs).values():
        ledger.add_all(part)
    return ledger.take()


def parts_of_step(setting: RankView, runs: Mapping[int, StageTraffic]) -> dict[StepPart, Sends]:
    """As `sends_of`, by the part of the step."""
    ledger = Ledger()
    found: dict[StepPart, Sends] = {}
    writers: Mapping[StepPart, Callable[[], None]] = {
        "comparison": lambda: _comparison(setting, ledger),
        "denominator": lambda: _denominator(setting, ledger),
        "blocks": lambda: _blocks(setting, runs, ledger),
        "zero": lambda: _zero(setting, runs, ledger),
        "messages": lambda: _all_messages(setting, ledger),
        "loss": lambda: _loss(setting, ledger),
        "tied": lambda: _ties(setting, ledger),
        "replicated": lambda: _deferred(setting, runs, ledger),
    }
    for part, write in writers.items():
        write()
        found[part] = ledger.take()
    return found


def _comparison(setting: RankView, ledger: Ledger) -> None:
    ranks = setting.plan.degrees.world_size
    if ranks > 1:
        size = _AGREEMENT_BYTES + _AGREEMENT_BYTES_PER_INPUT * len(setting.program.inputs)
        ledger.add(ALL_RANKS, "all_gather", collective("all_gather", ranks, size))


def _denominator(setting: RankView, ledger: Ledger) -> None:
    if needs_denominator(setting.program, setting.own_stages):
        run = _CountedRun(setting)
        with private.fake_tensors():
            run.setting.denominators([run.given()], per_micro_batch=True)
        ledger.add_all(_on_wire(setting, run.ledger.take()), setting.plan.degrees.num_micro_batches)


def _blocks(setting: RankView, runs: Mapping[int, StageTraffic], ledger: Ledger) -> None:
    degrees = setting.plan.degrees
    for stage in setting.own_stages:
        run, in_parts = runs[stage.index], 0
        if setting.splits_backward(stage):
            in_parts = sum(action.kind == "I" for order in stage_passes(degrees, stage.index) for action in order)
        ledger.add_all(_on_wire(setting, run.forward), degrees.num_micro_batches)
        ledger.add_all(_on_wire(setting, run.backward), degrees.num_micro_batches - in_parts)
        ledger.add_all(_on_wire(setting, run.backward_in_parts), in_parts)


def _zero(setting: RankView, runs: Mapping[int, StageTraffic], ledger: Ledger) -> None:
    for stage in setting.own_stages:
        groups = groups_of(setting, stage, runs[stage.index])
        zero_step(setting.plan.degrees, stage.index, groups, ledger)


def _all_messages(setting: RankView, ledger: Ledger) -> None:
    for stage in setting.own_stages:
        ledger.add_all(_messages(setting, stage), setting.plan.degrees.num_micro_batches)


def _loss(setting: RankView, ledger: Ledger) -> None:
    ranks = setting.plan.degrees.pp
    if ranks > 1:
        dtype = value_infos(setting.program)[setting.program.loss].dtype
        size = dtype.itemsize if not is_low(dtype) else _WIDE_LOSS_BYTES
        ledger.add(PIPELINE, "all_reduce", collective("all_reduce", ranks, size))


def _on_wire(setting: RankView, sends: Sends) -> Sends:
    """Without collectives of a single rank."""
    mesh = setting.plan.mesh
    return {(name, kind): traffic for (name, kind), traffic in sends.items() if mesh.degree_of(name) > 1}


def _messages(setting: RankView, stage: Stage) -> dict[Key, CollectiveTotal]:
    """Messages of one micro-batch between this stage and its neighbours: values forward, their gradients back."""
    infos, found = value_infos(setting.program), Ledger()

    def add(kind: str, names: Iterable[str]) -> None:
        for value in setting.empty_values(list(names), "meta"):
            size = value.numel() * value.element_size()
            found.add(PIPELINE, kind, CollectiveTotal(1, size, size if kind == "send" else 0))

    own, rank_of = setting.coordinates["pp"], setting.plan.degrees.rank_of_stage
    if stage.index + 1 < len(setting.stages) and rank_of(stage.index + 1) != own:
        add("send", stage.sends)
        add("recv", (name for name in stage.sends if infos[name].differentiable))
    if stage.index and rank_of(stage.index - 1) != own:
        add("recv", stage.receives)
        add("send", (name for name in stage.receives if infos[name].differentiable))
    return found.take()


def _summed(setting: RankView, names: Iterable[str], mesh_dim: str, ranks: int, ledger: Ledger) -> None:
    """Gradients of parameters summed over ranks in buckets."""
    infos, degrees = setting.program.parameters, setting.plan.degrees
    dtypes = [(n, summed_dtype(infos[n].dtype, degrees)) for n in names]
    sizes = [(setting.gradient_elements(n) * dtype.itemsize, dtype) for n, dtype in dtypes]
    for bucket in buckets(sizes):
        size = sum(sizes[i][0] for i in bucket)
        ledger.add(mesh_dim, "all_reduce", collective("all_reduce", ranks, size))


def _ties(setting: RankView, ledger: Ledger) -> None:
    infos, ties = setting.program.every_parameter, holders(setting)
    for ranks in sorted({ranks for ranks in ties.values() if len(ranks) > 1}):
        if setting.coordinates["pp"] in ranks:
            names = [name for name, held in ties.items() if held == ranks and infos[name].requires_grad]
            _summed(setting, names, PIPELINE, len(ranks), ledger)


def _deferred(setting: RankView, runs: Mapping[int, StageTraffic], ledger: Ledger) -> None:
    """Gradients of parameters that are replicated where their values differ, once a step."""
    own, degrees = trained(setting, runs), setting.plan.degrees
    whole = [n for n in own if not setting.is_sharded(n)]
    experts = [n for n in whole if setting.placements[n].is_of_experts]
    for names, over, ranks in (
        ([n for n in whole if n not in experts], data_name(degrees), degrees.data_ranks),
        (experts, EXPERTS_NAME, degrees.data_ranks // degrees.ep),
    ):
        if ranks > 1:
            _summed(setting, names, over, ranks, ledger)
    for name, degree in setting.plan.mesh.as_dict().items():
        if degree > 1 and owned_by(name) == "parameters":
            late = [n for n in own if name in setting.placements[n].deferred]
            _summed(setting, late, name, degree, ledger)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMoves:
    """Bytes between device and host of one rank in one `forward_backward`: of the device's own copies, and of FSDP2's.

    Gradients of an optimizer on the host go there once a step, its parameters come once. Every gather of offloaded
    parameters brings a shard, every sum takes one. Tensors of offloaded calls go and come in every micro-batch.
    """

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    fsdp_to_host_bytes: int = 0
    fsdp_to_device_bytes: int = 0


def host_moves(setting: RankView, runs: Mapping[int, StageRun]) -> HostMoves:
    """What a rank moves in one step, from one micro-batch of each of its stages."""
    degrees = setting.plan.degrees
    times = degrees.num_micro_batches
    up = sum(run.fetched_bytes for run in runs.values()) * times
    down = sum(run.moved_bytes for run in runs.values()) * times
    if degrees.offloads(OPTIMIZER):
        up += trainable_bytes(setting)
        down += sum(map(setting.gradient_bytes, trained(setting, runs)))
    if not degrees.offloads(PARAMETERS):
        return HostMoves(to_host_bytes=down, to_device_bytes=up)
    fsdp_up = fsdp_down = 0
    for stage in setting.own_stages:
        groups, reached = groups_of(setting, stage, runs[stage.index]), runs[stage.index].gradients
        step = zero_step(degrees, stage.index, groups, Ledger())
        fsdp_up += step.to_device_bytes
        for at, times in step.sums.items():
            own = (name for name in groups[at].names if name in reached)
            fsdp_down += times * sum(map(setting.gradient_bytes, own))
    return HostMoves(
        to_host_bytes=down,
        to_device_bytes=up,
        fsdp_to_host_bytes=fsdp_down,
        fsdp_to_device_bytes=fsdp_up,
    )
