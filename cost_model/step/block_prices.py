"""Seconds of one micro-batch in one block on one rank: computing and exposed collectives.

The prices do not depend on pipeline stages, ZeRO or recomputation. Layouts that differ only in these share prices. If a
block sends over data-parallel ranks, its price depends on the distance between these ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.cost_model.step.block_time import BlockSeconds, computing_seconds
from autopar.cost_model.step.context import Basis, Passes
from autopar.cost_model.step.experts import (
    count_seconds,
    exchange_seconds,
    has_experts,
    is_expert_product,
    least_exchange_seconds,
)
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.offload import is_on_host
from autopar.cost_model.step.recomputed_modules import module_savings
from autopar.cost_model.step.saved_bytes import SavedBytes, activations
from autopar.cost_model.work.block_work import PASSES, BlockWork, Family
from autopar.ir.arrays import Floats
from autopar.ir.offload import ACTIVATIONS
from autopar.ir.sharding import Owned, owned_by

CONTEXT_EXPOSED = 0.1  # exposed part of a ring's keys and values: assumed

_NOTHING = np.zeros(1)
NOTHING_SAVED = SavedBytes(
    none=_NOTHING, selective=_NOTHING, full=_NOTHING, again=_NOTHING, whole=_NOTHING, always=_NOTHING
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrices:
    """Seconds of one block. Selective recomputation adds `selective` to `backward`. Full recomputation adds
    `forward`. The block saves `saved_bytes` of a micro-batch, of which `input_bytes` are its input."""

    forward: Floats
    backward: Floats
    weight: Floats  # as in `Passes`
    selective: Floats
    parts: Mapping[str, Floats]  # by name: seconds that computing takes or waits
    hidden: Mapping[str, Floats]  # by name: seconds of collectives that run beside computing
    saved: SavedBytes = NOTHING_SAVED  # on the host, if saved tensors are there


def block_prices(basis: Basis, family: Family[Any], layouts: Layouts, role: str) -> BlockPrices:
    """The prices of a repeated block without the collectives of ZeRO."""
    seconds = _of_variants(basis, family, layouts, role, is_narrow=basis.machine.is_narrow)
    forward, backward = _tensor_collectives(basis, family, layouts, role)
    context, ring = _collectives(basis, family, layouts, role, "sequence"), _ring(basis, family, layouts, role, seconds)
    beside = _beside_attention(basis, family, layouts, role, seconds)
    experts, counts = _experts(basis, family, layouts, role), _counts(basis, family, layouts, role)
    tensor = forward + backward
    behind = forward * _behind(basis, layouts, is_forward=True) + backward * _behind(basis, layouts, is_forward=False)
    of_feed_forward = forward / 2 + experts[0] + counts  # attention sends the other half
    forward, backward = (
        forward + context[0] + beside.exposed[0] + ring.exposed[0] + experts[0] + counts,
        backward + context[1] + beside.exposed[1] + ring.exposed[1] + experts[1],
    )
    parts = {
        "products": seconds.products,
        "attention": seconds.attention,
        "memory-bound": seconds.memory,
        "host": seconds.waiting,
        "tensor collectives": tensor,
        "context collectives": sum(context) + sum(beside.exposed) + sum(ring.exposed) + 0.0 * forward,
        "expert collectives": sum(experts) + 0.0 * forward,
        "expert counts": counts + 0.0 * forward,
    }
    hidden = {"tensor collectives": behind, "context collectives": sum(ring.hidden) + sum(beside.hidden)}
    return BlockPrices(
        forward=seconds.forward + forward,
        backward=seconds.backward + backward,
        weight=seconds.weight,
        selective=_selective(basis, family, layouts, role, seconds, of_feed_forward),
        parts=parts,
        hidden=hidden,
        **_saved(basis, family, layouts, role),
    )


def _saved(basis: Basis, family: Family[Any], layouts: Layouts, role: str) -> dict[str, SavedBytes]:
    """The bytes that go to the host, if the saved tensors do."""
    engine = basis.machine.engine
    if not is_on_host(engine, ACTIVATIONS):
        return {}
    alone = replace(basis.shape, counts=((role, np.ones(1)),))
    return {"saved": activations(family, alone, layouts, engine)}


def _selective(
    basis: Basis, family: Family[Any], layouts: Layouts, role: str, whole: BlockSeconds, sent: Floats
) -> Floats:
    """Seconds of selective recomputation: of the block's chosen operators, or as the engine recomputes."""
    work, kind = family.block(role, "tp"), basis.machine.engine.selective
    sending: Floats = np.zeros(1)
    if work.selected is not None:
        operators = work.selected.operators
    elif kind == "half":
        return whole.forward / 2
    elif kind == "products":
        return whole.forward - whole.attention_forward - whole.products / PASSES / 2
    else:
        chosen = module_savings(work, role, basis.shape.hidden, kind)
        operators, sending = chosen.operators, sent if chosen.sends else sending
    products, others = (tuple(op for op in operators if (op.kind == "memory") is kind) for kind in (False, True))
    part = replace(work, products=products, eager=others, fused=others, sent=())
    return _seconds(basis, part, layouts, basis.machine.is_narrow).forward + sending


def end_passes(basis: Basis, family: Family[Any], layouts: Layouts, role: str) -> Passes:
    """The passes of the first or the last block, in 16 bits: heads are not computed in float8."""
    if role not in family.roles:
        return Passes(forward=np.zeros(1), backward=np.zeros(1))
    seconds = _of_variants(basis, family, layouts, role, is_narrow=False)
    forward, backward = _tensor_collectives(basis, family, layouts, role)
    context = _collectives(basis, family, layouts, role, "sequence")
    beside = _beside_attention(basis, family, layouts, role, seconds).exposed
    experts = _collectives(basis, family, layouts, role, "experts")
    return Passes(
        forward=seconds.forward + forward + context[0] + beside[0] + experts[0],
        backward=seconds.backward + backward + context[1] + beside[1] + experts[1],
        weight=seconds.weight,
    )


def _of_variants(basis: Basis, family: Family[Any], layouts: Layouts, role: str, *, is_narrow: bool) -> BlockSeconds:
    works = [family.block(role, variant) for variant in ("tp", "sp")]
    if works[0] is works[1]:  # in a captured program the labels have decided
        return _seconds(basis, works[0], layouts, is_narrow)
    tensor, sequence = (_seconds(basis, work, layouts, is_narrow) for work in works)
    chosen = layouts.sequence_parallel
    return BlockSeconds(
        **{name: np.where(chosen, getattr(sequence, name), getattr(tensor, name)) for name in BlockSeconds.__slots__}
    )


def _seconds(basis: Basis, work: BlockWork[Any], layouts: Layouts, is_narrow: bool) -> BlockSeconds:
    machine, is_split = basis.machine, layouts.tp > 1
    return computing_seconds(work, machine.speeds, machine.engine, is_narrow=is_narrow, is_split=is_split)


def _hidden(basis: Basis, layouts: Layouts, *, is_forward: bool) -> Floats:
    mode = basis.machine.engine.tensor_overlap
    if basis.machine.speeds.in_one_thread:  # a collective takes the cores of the computation
        return np.zeros(1)
    if mode == "pipelined":  # needs activations that are split over the sequence
        return np.where(layouts.sequence_parallel, basis.machine.mechanisms.pipelined_hidden, 0.0)
    return np.asarray(basis.machine.mechanisms.async_hidden if mode == "async" and not is_forward else 0.0)


def _behind(basis: Basis, layouts: Layouts, *, is_forward: bool) -> Floats:
    """Hidden seconds of tensor collectives for each exposed second."""
    hidden = _hidden(basis, layouts, is_forward=is_forward)
    return np.asarray(hidden / (1 - hidden))


def _tensor_collectives(basis: Basis, family: Family[Any], layouts: Layouts, role: str) -> tuple[Floats, Floats]:
    """Exposed seconds of a block's collectives over tensor ranks and ranks with other samples, forward and backward."""
    forward, backward = _collectives(basis, family, layouts, role, "batch", "parameters")
    return (
        forward * (1 - _hidden(basis, layouts, is_forward=True)),
        backward * (1 - _hidden(basis, layouts, is_forward=False)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside:
    """Seconds of what is sent beside computing, forward and backward."""

    exposed: tuple[Floats, Floats]
    hidden: tuple[Floats, Floats]


def _beside_attention(basis: Basis, family: Family[Any], layouts: Layouts, role: str, seconds: BlockSeconds) -> _Beside:
    """The keys and values that travel between context ranks while attention computes, by labels."""
    sent = _collectives(basis, family, layouts, role, "sequence", beside=True)
    attention = seconds.attention_forward, seconds.attention - seconds.attention_forward
    ranks, _ = _ranks(basis, layouts, "cp0" if basis.shape.context_dims else "cp")
    share = 0.0 if basis.machine.speeds.in_one_thread else (ranks - 1) / ranks
    hidden = [np.minimum(s, share * computing) for s, computing in zip(sent, attention, strict=True)]
    return _Beside(
        exposed=(sent[0] - hidden[0], sent[1] - hidden[1]),
        hidden=(hidden[0], hidden[1]),
    )


def _collectives(
    basis: Basis, family: Family[Any], layouts: Layouts, role: str, *over: Owned, beside: bool = False
) -> tuple[Floats, Floats]:
    """Seconds of a block's labelled collectives over mesh dimensions of some kinds, forward and backward."""
    seconds, known = [np.zeros(1), np.zeros(1)], dict[tuple[str, str, bytes], Floats]()
    for variant, is_chosen in (("tp", 1 - layouts.sequence_parallel), ("sp", layouts.sequence_parallel)):
        for sent in family.block(role, variant).sent:
            if sent.of == "parameter" or (sent.of == "beside") is not beside or owned_by(sent.mesh_dim) not in over:
                continue
            key = sent.collective, sent.mesh_dim, np.asarray(sent.whole_bytes).tobytes()  # many are equal in a block
            if key not in known:
                ranks, stride = _ranks(basis, layouts, sent.mesh_dim)
                known[key] = basis.machine.links.seconds(sent.collective, sent.whole_bytes, ranks, stride)
            i = 0 if sent.is_forward else 1
            seconds[i] = seconds[i] + is_chosen * known[key] * (1.0 if sent.times is None else sent.times)
    return seconds[0], seconds[1]


def _ranks(basis: Basis, layouts: Layouts, mesh_dim: str) -> tuple[Floats, Floats]:
    """The number of ranks of a mesh dimension of labels, and the stride between them."""
    one = np.ones(1)
    if owned_by(mesh_dim) == "batch":
        inner = layouts.ep if basis.machine.engine.sends_by_labels else 1.0
        return layouts.dp / inner, layouts.data_stride * layouts.cp * inner
    if owned_by(mesh_dim) == "experts":
        return layouts.ep, layouts.tp * layouts.cp
    if owned_by(mesh_dim) == "sequence":
        parts = basis.shape.context_dims
        return next(((n * one, by * layouts.tp) for name, n, by in parts if name == mesh_dim), (layouts.cp, layouts.tp))
    return next(((n * one, by * one) for name, n, by in basis.shape.tensor_dims if name == mesh_dim), (layouts.tp, one))


def _ring(basis: Basis, family: Family[Any], layouts: Layouts, role: str, seconds: BlockSeconds) -> _Beside:
    """The keys and values of attention over context ranks, without labels.

    In a "ring" they travel step by step, and attention hides nine tenths of them. The backward pass sends the values
    and their gradients. "gathered" means one all-gather in each pass. The first of the ranks' parts of attention hides
    it, and the rest waits. The gradients travel step by step in float32 beside the other parts.
    """
    if basis.machine.engine.sends_by_labels:
        return _Beside(exposed=(np.zeros(1), np.zeros(1)), hidden=(np.zeros(1), np.zeros(1)))
    element_bytes = basis.shape.element_bytes
    kv_bytes = np.zeros(1)
    for op in family.block(role, "tp").products:
        if op.kind == "attention":
            heads = np.asarray(op.count / layouts.micro_batch)
            kv_bytes = kv_bytes + 2 * element_bytes * layouts.micro_batch * op.n * op.k * heads
    sent = np.where(layouts.cp > 1, basis.machine.links.seconds("all_gather", kv_bytes, layouts.cp, layouts.tp), 0.0)
    if basis.machine.engine.context == "ring":
        exposed = CONTEXT_EXPOSED * sent, 2 * CONTEXT_EXPOSED * sent
        return _Beside(exposed=exposed, hidden=(sent - exposed[0], 2 * sent - exposed[1]))
    forward, backward = seconds.attention_forward, seconds.attention - seconds.attention_forward
    gradients = sent * 4 / element_bytes
    hidden = (
        np.minimum(sent, forward / layouts.cp),
        np.minimum(sent, backward / layouts.cp) + np.minimum(gradients, backward * (1 - 1 / layouts.cp)),
    )
    return _Beside(exposed=(sent - hidden[0], sent + gradients - hidden[1]), hidden=hidden)


def _experts(basis: Basis, family: Family[Any], layouts: Layouts, role: str) -> tuple[Floats, Floats]:
    """Seconds of sending tokens to their experts and back, forward and backward: as labels say, or by formula."""
    if basis.machine.engine.sends_by_labels and (_has_expert_labels(family) or not has_experts(role)):
        return _collectives(basis, family, layouts, role, "experts")
    if not has_experts(role):
        return np.zeros(1), np.zeros(1)
    if basis.machine.engine.sends_by_labels:
        widths = [op.k for op in family.block(role, "tp").products if is_expert_product(op)]
        both = least_exchange_seconds(basis, layouts, widths)
    else:
        both = 2 * exchange_seconds(basis, layouts)
    return both, both


def _has_expert_labels(family: Family[Any]) -> bool:
    works = (family.block(role, "tp") for role in family.roles)
    return any(owned_by(sent.mesh_dim) == "experts" for work in works for sent in work.sent)


def _counts(basis: Basis, family: Family[Any], layouts: Layouts, role: str) -> Floats:
    """Seconds of waiting for counts of rows, forward. With labels the all-to-all of the counts is one of theirs."""
    if not has_experts(role):
        return np.zeros(1)
    sent = family.block(role, "tp").sent
    if not basis.machine.engine.sends_by_labels:
        return count_seconds(basis, family, layouts, role, exchange_seconds(basis, layouts))
    if not any(each.collective == "all_to_all" and owned_by(each.mesh_dim) == "experts" for each in sent):
        return np.zeros(1)
    return count_seconds(basis, family, layouts, role, exchange_seconds(basis, layouts), are_sent=True)
