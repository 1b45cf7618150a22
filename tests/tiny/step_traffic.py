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
(`autopar.cost_model.dry_run.zero`). Every other part sends once in a step, the gradients in buckets.

Clipping, the optimizer and evaluation are no part of a step. The bytes of a collective are the bytes of this rank's
operand (`autopar.cost_model.dry_run.ledger.CollectiveTotal`). The bytes of a message are the bytes of its tensor.
"""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Literal

from autopar.capture.analysis import Analysis
from autopar.capture.nodes import value_infos
from autopar.cost_model.dry_run.ledger import CollectiveTotal, Key, Ledger, Sends, collective
from autopar.cost_model.dry_run.memory import tied_ranks, trained
from autopar.cost_model.dry_run.rank_view import RankView
from autopar.cost_model.dry_run.shards import is_sharded, local_gradient_elements
from autopar.cost_model.dry_run.stage_run import StageRun, run_denominator, run_stages
from autopar.cost_model.dry_run.zero import (
    EXPERTS_NAME,
    data_name,
    groups_of,
    stage_passes,
    zero_step,
)
from autopar.ir.plan import Plan
from autopar.ir.precision import is_low, summed_dtype
from autopar.ir.program import Program
from autopar.ir.sharding import owned_by
from autopar.ir.stages import Stage, needs_denominator
from autopar.ir.storage import buckets

ALL_RANKS, PIPELINE = "all ranks", "pp"
StepPart = Literal["comparison", "denominator", "blocks", "zero", "messages", "loss", "tied", "replicated"]
_AGREEMENT_BYTES, _AGREEMENT_BYTES_PER_INPUT = 56, 16
_WIDE_LOSS_BYTES = 4  # losses of 16 bits are summed in float32


def step_traffic(
    program: Program, analysis: Analysis, plan: Plan, rank: int = 0, *, device: str = "cpu"
) -> Mapping[Key, CollectiveTotal]:
    """The traffic of a rank in one step, by (mesh dimension, kind).

    `analysis` is the analysis of the program on the plan's mesh. `device` is the device type of the real step. It
    decides which tensors attention saves. A mesh dimension is one of the plan, a joined one (``tp0_tp1``), ``pp`` or
    ``all ranks``. If ``dp_shard`` and ``dp_replicate`` are both above 1, they are two dimensions.
    """
    setting = RankView(program, analysis, plan, rank)
    return sends_of(setting, run_stages(setting, device), device)


def sends_of(setting: RankView, runs: Mapping[int, StageRun], device: str = "cpu") -> Mapping[Key, CollectiveTotal]:
    """The traffic of a rank in one step, from one micro-batch of each of its stages."""
    ledger = Ledger()
    for part in parts_of_step(setting, runs, device).values():
        ledger.add_all(part)
    return ledger.take()


def parts_of_step(
    setting: RankView, runs: Mapping[int, StageRun], device: str = "cpu"
) -> Mapping[StepPart, Mapping[Key, CollectiveTotal]]:
    """As `sends_of`, by the part of the step."""
    ledger = Ledger()
    found: dict[StepPart, Mapping[Key, CollectiveTotal]] = {}
    writers: Mapping[StepPart, Callable[[], None]] = {
        "comparison": lambda: _comparison(setting, ledger),
        "denominator": lambda: _denominator(setting, device, ledger),
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


def _denominator(setting: RankView, device: str, ledger: Ledger) -> None:
    if needs_denominator(setting.program, setting.own_stages):
        ledger.add_all(_on_wire(setting, run_denominator(setting, device)), setting.plan.degrees.num_micro_batches)


def _blocks(setting: RankView, runs: Mapping[int, StageRun], ledger: Ledger) -> None:
    degrees = setting.plan.degrees
    for stage in setting.own_stages:
        run, in_parts = runs[stage.index], 0
        if setting.splits_backward(stage):
            in_parts = sum(action.kind == "I" for order in stage_passes(degrees, stage.index) for action in order)
        ledger.add_all(_on_wire(setting, run.forward), degrees.num_micro_batches)
        ledger.add_all(_on_wire(setting, run.backward), degrees.num_micro_batches - in_parts)
        ledger.add_all(_on_wire(setting, run.backward_in_parts), in_parts)


def _zero(setting: RankView, runs: Mapping[int, StageRun], ledger: Ledger) -> None:
    for stage in setting.own_stages:
        zero_step(setting, stage, groups_of(setting, stage, runs[stage.index]), ledger)


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
        for name in names:
            size = prod(setting.local_shape(name)) * infos[name].dtype.itemsize
            found.add(PIPELINE, kind, CollectiveTotal(1, size, size if kind == "send" else 0))

    own = setting.pipeline_rank_of(stage.index)
    if stage.index + 1 < len(setting.stages) and setting.pipeline_rank_of(stage.index + 1) != own:
        add("send", stage.sends)
        add("recv", (name for name in stage.sends if infos[name].differentiable))
    if stage.index and setting.pipeline_rank_of(stage.index - 1) != own:
        add("recv", stage.receives)
        add("send", (name for name in stage.receives if infos[name].differentiable))
    return found.take()


def _summed(setting: RankView, names: Iterable[str], mesh_dim: str, ranks: int, ledger: Ledger) -> None:
    """Gradients of parameters summed over ranks in buckets."""
    infos, degrees = setting.program.parameters, setting.plan.degrees
    dtypes = [(n, summed_dtype(infos[n].dtype, degrees)) for n in names]
    sizes = [(local_gradient_elements(setting, n) * dtype.itemsize, dtype) for n, dtype in dtypes]
    for bucket in buckets(sizes):
        size = sum(sizes[i][0] for i in bucket)
        ledger.add(mesh_dim, "all_reduce", collective("all_reduce", ranks, size))


def _ties(setting: RankView, ledger: Ledger) -> None:
    infos, ties = setting.program.parameters, tied_ranks(setting)
    for ranks in sorted({ranks for ranks in ties.values() if len(ranks) > 1}):
        if setting.coordinates["pp"] in ranks:
            names = [name for name, held in ties.items() if held == ranks and infos[name].requires_grad]
            _summed(setting, names, PIPELINE, len(ranks), ledger)


def _deferred(setting: RankView, runs: Mapping[int, StageRun], ledger: Ledger) -> None:
    """Gradients of parameters that are replicated where their values differ, once a step."""
    own, degrees = trained(setting, runs), setting.plan.degrees
    whole = [n for n in own if not is_sharded(setting, n)]
    experts = [n for n in whole if setting.storages[n].is_of_experts]
    for names, over, ranks in (
        ([n for n in whole if n not in experts], data_name(degrees), degrees.data_ranks),
        (experts, EXPERTS_NAME, degrees.data_ranks // degrees.ep),
    ):
        if ranks > 1:
            _summed(setting, names, over, ranks, ledger)
    for name, degree in setting.plan.mesh.as_dict().items():
        if degree > 1 and owned_by(name) == "parameters":
            late = [n for n in own if name in setting.storages[n].deferred]
            _summed(setting, late, name, degree, ledger)
