"""A lower bound on the memory of one rank, for every schedule.

    part             bytes
    state            trained parameters, their gradients and two moments
    one operator     operands and output of the operator that holds most

State has the parameter's dtype. The labels and the ZeRO stage divide it. A frozen parameter has neither gradient nor
moments. The parameter operands of the operator are part of the state and are counted once. Saved activations come on
top, so a plan that this bound refuses cannot run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.capture.analysis import Analysis
from autopar.cost_model.work.operator_cost import is_view
from autopar.errors import InfeasibleError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.offload import ACTIVATIONS, NO_OFFLOAD, OPTIMIZER, PARAMETERS
from autopar.ir.optimizers import OwnPart, optimizer_named
from autopar.ir.plan import BlockLabels
from autopar.ir.precision import stored_dtype
from autopar.ir.program import Program, StateInfo, hidden_parameters
from autopar.ir.sharding import Type
from autopar.ir.stages import needed_results, stages_of
from autopar.lowering.loss_region import region_of_block
from autopar.rules.variants import by_label, variants
from autopar.words.numbers import readable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """Bytes of one rank: parameter state, and the operator that holds most beside it."""

    state_bytes: float
    operator: str
    operator_bytes: float
    is_whole: bool

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + self.operator_bytes


def least_memory(
    program: Program,
    analysis: Analysis,
    labels: Sequence[BlockLabels],
    degrees: Degrees,
    cuts: Sequence[int] = (),
) -> LeastMemory:
    """The lower bound under `labels` on the mesh of `degrees`, of the pipeline rank with the largest state."""
    held = (0.0, "", False)
    kept = needed_results(program) if degrees.loss_chunks > 1 else ()
    for index, block in enumerate(program.blocks):
        region = region_of_block(analysis, block, index, labels[index], degrees.mesh, kept[index]) if kept else ""
        in_chunks = frozenset[str]() if isinstance(region, str) else region.inside
        parameters = {name for name, role in block.ports.items() if role == "parameter"}
        for node in block.graph.nodes:
            if node.op != "call_function" or is_view(call := analysis.calls[index][node.name]):
                continue
            chosen = [
                by_label(variants(analysis.bounds[index][node.name], degree), label)
                for label, degree in zip(labels[index].labels[node.meta["key"]], degrees.mesh.degrees, strict=True)
            ]
            names = (*analysis.operands[index][node.name], node.name)
            size = 0.0
            for k, (name, info) in enumerate(zip(names, (*call.operands, call.output), strict=True)):
                shares = (v.share for v in chosen if (*v.operands, v.output)[k].kind == "S")
                parts = degrees.loss_chunks if name in in_chunks else 1
                size += 0.0 if name in parameters else prod(info.shape) * info.dtype.itemsize * prod(shares) / parts
            held = max(held, (size, f"{block.name}: {node.meta['key']}", not any(v.factor for v in chosen)))
    return LeastMemory(
        state_bytes=_state_bytes(program, labels, degrees, cuts),
        operator_bytes=held[0],
        operator=held[1],
        is_whole=held[2],
    )


def refuse_what_does_not_fit(
    program: Program,
    analysis: Analysis,
    labels: Sequence[BlockLabels],
    degrees: Degrees,
    cluster: ClusterSpec,
    cuts: Sequence[int] = (),
) -> None:
    """Raise `InfeasibleError`, naming operator, bytes and remedy, where the bound is more than a device's memory."""
    least, memory = least_memory(program, analysis, labels, degrees, cuts), cluster.min_memory_bytes
    if least.total_bytes <= memory:
        return
    where = "whole on every rank" if least.is_whole else "one rank's part"
    per_rank = f"a micro-batch of {degrees.micro_batch} sequences" if degrees.micro_batch else "the batch"
    split = "more devices (tp, or dp with --zero 3)" if degrees.zero == 3 or degrees.data_ranks == 1 else "--zero 3"
    is_here = degrees.offload in (NO_OFFLOAD, ACTIVATIONS)
    remedy = (
        f"split the state over {split}{', or keep it on the host (--offload optimizer)' * is_here}"
        if least.state_bytes > least.operator_bytes
        else f"make {per_rank} or the sequence smaller, or give the operator a rule"
        if least.is_whole
        else f"make {per_rank} or the sequence smaller, or raise tp"
    )
    state, largest = readable_bytes(least.state_bytes), readable_bytes(least.operator_bytes)
    raise InfeasibleError(
        f"the plan does not fit: a rank needs at least {readable_bytes(least.total_bytes)}, a device has "
        f"{readable_bytes(memory)}. Parameters, gradients and optimizer state take {state}, operands and output of "
        f"{least.operator} {largest} ({where}). Remedy: {remedy}"
    )


def _state_bytes(program: Program, labels: Sequence[BlockLabels], degrees: Degrees, cuts: Sequence[int]) -> float:
    """Parameters, gradients and moments of one rank: ZeRO 1 divides the moments, 2 the gradients too, 3 everything."""
    types: dict[str, tuple[Type, ...]] = {}
    for call in program.calls:
        for (port, role), name in zip(program.blocks[call.block].ports.items(), call.arguments, strict=True):
            if isinstance(name, str) and role == "parameter":
                types.setdefault(name, tuple(labels[call.block].ports[port]))
    hidden, totals = hidden_parameters(program), dict.fromkeys(range(degrees.pp), 0.0)
    held = [(degrees.rank_of_stage(s.index), name) for s in stages_of(program, cuts) for name in s.parameters]
    for rank, name in dict.fromkeys(held):
        info = program.parameters[name]
        mesh, kinds = degrees.mesh, types.get(name, ())
        split = prod(d for t, d in zip(kinds, mesh.degrees, strict=False) if t.kind == "S")
        experts = any(kinds[i].kind == "S" for i in mesh.owning("experts") if kinds)
        shards = degrees.expert_shard_ranks if experts else degrees.shard_ranks
        totals[rank] += _bytes_of(info, split, shards, degrees, is_hidden=name in hidden)
    return max(totals.values())


def _bytes_of(info: StateInfo, split: int, shards: int, degrees: Degrees, *, is_hidden: bool) -> float:
    """One parameter that tensor or expert ranks split, and that ZeRO divides into shards.

    It counts with its gradient and the optimizer's state, as far as they are on the device.

    FSDP2 gathers a parameter on the host for a block at a time under ZeRO 3, and for the step under ZeRO 1 and 2. Under
    ZeRO 1 and 2 a whole parameter, and under ZeRO 1 its gradient, has the dtype of computing.
    """
    item, zero = stored_dtype(info, degrees).itemsize, degrees.zero
    whole = info.num_elements * (min(item, info.dtype.itemsize) if zero in (1, 2) else item) / split
    weight = whole / (shards if zero == 3 else 1)
    if degrees.offloads(PARAMETERS):
        return 0.0 if degrees.fsdp_stage == 3 else weight
    if not info.requires_grad:
        return weight
    gradient = info.num_elements * item / split / shards if zero >= 2 else whole
    if degrees.offloads(OPTIMIZER):
        return weight + gradient
    elements = int(info.num_elements / split / (shards if zero >= 1 else 1))
    part = OwnPart(shape=info.shape, num_elements=elements, element_bytes=item, is_hidden=is_hidden)
    return weight + gradient + optimizer_named(degrees.optimizer).state_bytes(part)
