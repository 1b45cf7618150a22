"""Seconds of one training step of many layouts at once, in closed form.

    step = (pipeline + data-parallel sums that wait + optimizer + fixed) · (1 + σ·sqrt(2 ln devices))

    pipeline  n·slowest rank + idle of filling and emptying, over ranks whose blocks, embedding and head differ
    block     computing (`autopar.cost_model.block_time`) + tensor collectives that are not hidden; under ZeRO 3 the
              longer of that and its gathers and reduce-scatters, and a part of the shorter (they share the device)

The last factor is the expected largest of n normal variables: every rank waits for the slowest one. (Fisher, Tippett
1928; the form for large n.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.block_time import BlockSeconds, Speeds, block_seconds
from autopar.cost_model.engine import Engine
from autopar.cost_model.expressions import BlockWork, Family
from autopar.cost_model.layout import Layouts, Shape
from autopar.cost_model.links import Links
from autopar.cost_model.mechanisms import Mechanisms

Floats = NDArray[Any]
PRODUCTS = 3  # of every product forward: itself, for its input, for its weight
CONTEXT_EXPOSED = 0.1  # of passing keys and values on in a ring: assumed
BLOCKING_BESIDE = 0.5  # of the shorter of computing and gathers that do not prefetch, beside the longer: assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of device and its links, as the time model uses them."""

    speeds: Speeds
    links: Links
    overlap_slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one rank's share of something in one micro-batch; `weight` is the part of `backward` whose results
    no other pass waits for."""

    forward: Floats
    backward: Floats
    weight: Floats | float = 0.0

    @property
    def both(self) -> Floats:
        found: Floats = self.forward + self.backward
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """A pipeline whose stages are known: seconds of one micro-batch on the busiest rank, `blocks` how many repeated
    blocks that rank has; seconds of the step that it idles, and that it waits for messages."""

    busy: Floats
    blocks: Floats
    idle: Floats
    messages: Floats


# from the passes of every role, and the seconds of one message, to what a plan's own stages make of them
Pipeline: TypeAlias = Callable[[Mapping[str, Passes], Floats], Pipelined]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of a step, and what makes them up; the parts add up to `seconds`.

    `hidden` are seconds of collectives that run beside computing, by the names of the parts that they would add to.
    """

    seconds: Floats
    parts: dict[str, Floats]
    hidden: dict[str, Floats]


def step_seconds(
    family: Family[Any],
    shape: Shape,
    layouts: Layouts,
    machine: Machine,
    engine: Engine,
    mechanisms: Mechanisms,
    *,
    in_float8: bool,
    fused: bool,
    pipeline: Pipeline | None = None,
) -> StepSeconds:
    """Price every layout. `family` holds the numbers of its blocks for one micro-batch of each layout.

    With a `pipeline` its stages count; without one, blocks are cut evenly and the closed form of 1F1B holds.
    """
    model = _Model(family, shape, layouts, machine, engine, mechanisms, in_float8=in_float8, fused=fused)
    block, head = model.mean_block(), model.end("last")
    first = model.end("first")
    pp, n, v = layouts.pp, layouts.micro_batches, np.maximum(layouts.virtual, 1)
    per_rank, last_rank = _blocks_per_rank(shape.blocks, layouts, engine)
    middle = per_rank * block.both
    ends = np.maximum(middle + np.where(pp > 1, first.both, 0.0), last_rank * block.both + head.both)
    busy = np.where(pp > 1, ends, middle + head.both + first.both)
    message = model.message()
    idle = np.where(pp > 1, (pp - 1) / v * (middle + 2 * message), 0.0)
    messages = np.where(pp > 1, v * message * n, 0.0)  # one each way at once: links are full duplex
    if pipeline is not None:
        own = pipeline({**model.passes, "first": first, "last": head}, message)
        busy, per_rank, idle, messages = own.busy, own.blocks, own.idle, own.messages
        middle = per_rank * block.both
    state = model.state(per_rank)
    sums, optimizer = model.data_sums(state, middle), model.optimizer(state)
    adding = model.accumulation(state)
    ends_gathers = model.end_gathers() * n
    straggling = mechanisms.straggler * np.sqrt(2 * np.log(np.maximum(layouts.num_devices, 1.0001)))
    before = n * busy + idle + messages + sums + optimizer + adding + ends_gathers + mechanisms.step_s
    parts = {name: n * per_rank * seconds for name, seconds in model.parts.items()}
    parts["embedding, head, loss"] = n * (busy - middle)
    parts |= {"bubble": idle, "messages": messages, "data collectives": sums + ends_gathers, "optimizer": optimizer}
    parts["gradient accumulation"] = adding
    parts |= {"fixed": mechanisms.step_s + 0.0 * before, "stragglers": straggling * before}
    hidden = {name: n * per_rank * seconds for name, seconds in model.hidden.items()}
    waits = mechanisms.message_exposed if engine.messages == "overlapped" else 1.0
    hidden |= {"messages": messages * (1 / waits - 1), "data collectives": model.hidden_sums}
    return StepSeconds(seconds=before * (1 + straggling), parts=parts, hidden=hidden)


def _blocks_per_rank(blocks: Floats, layouts: Layouts, engine: Engine) -> tuple[Floats, Floats]:
    """Blocks of the fullest middle rank, and of the rank that has the head."""
    pp = layouts.pp
    even = np.ceil(blocks / pp)
    if not engine.balances_ends:
        return np.where(pp > 1, even, blocks), np.where(pp > 1, even, blocks)
    slots = (blocks + 2) / pp  # embedding and head take the place of a block each
    uneven = (pp > 1) & (np.mod(blocks, pp) != 0)
    return np.where(uneven, np.ceil(slots), even), np.where(uneven, np.ceil(slots) - 1, even)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Elements of parameters on one pipeline rank: what data-parallel sums move, and expert parameters apart."""

    dense: Floats
    expert: Floats


class _Model:
    """One pricing; a class only to pass what every part needs."""

    def __init__(
        self,
        family: Family[Any],
        shape: Shape,
        layouts: Layouts,
        machine: Machine,
        engine: Engine,
        mechanisms: Mechanisms,
        *,
        in_float8: bool,
        fused: bool,
    ) -> None:
        self.family, self.shape, self.layouts = family, shape, layouts
        self.machine, self.engine, self.mechanisms = machine, engine, mechanisms
        self.in_float8, self.fused = in_float8, fused
        self.parts: dict[str, Floats] = {}
        self.hidden: dict[str, Floats] = {}
        self.hidden_sums: Floats = np.zeros(1)
        self.passes: dict[str, Passes] = {}

    # ---- blocks ----

    def mean_block(self) -> Passes:
        """The mean of dense and expert blocks, with their collectives; fills `parts`, `hidden`, `passes`."""
        shape = self.shape
        found: list[tuple[Floats, Passes, dict[str, Floats], dict[str, Floats]]] = []
        for role, count in shape.counts:
            if np.any(count > 0):
                passes, parts, hidden = self._block(role)
                found.append((count / shape.blocks, passes, parts, hidden))
                self.passes[role] = passes
        self.parts = {name: np.asarray(sum(one[0] * one[2][name] for one in found)) for name in found[0][2]}
        self.hidden = {name: np.asarray(sum(one[0] * one[3][name] for one in found)) for name in found[0][3]}
        return Passes(
            forward=np.asarray(sum(share * passes.forward for share, passes, *_ in found)),
            backward=np.asarray(sum(share * passes.backward for share, passes, *_ in found)),
        )

    def _block(self, role: str) -> tuple[Passes, dict[str, Floats], dict[str, Floats]]:
        layouts = self.layouts
        seconds = self._of_variants(role, in_float8=self.in_float8)
        forward, backward = self._tensor_collectives(role)
        context = self._context(role)
        experts = self._all_to_all() if role.startswith("moe_layer") else np.zeros(1)
        tensor = forward + backward
        behind = forward * self._behind(is_forward=True) + backward * self._behind(is_forward=False)
        forward, backward = forward + context + experts, backward + 2 * context + experts
        again = np.where(layouts.recompute == 2, seconds.forward + forward, 0.0)
        again = np.where(layouts.recompute == 1, self._selective(seconds), again)
        computing = Passes(forward=seconds.forward + forward, backward=seconds.backward + backward + again)
        whole, moving = self._with_gathers(computing, role)
        parts = {
            "products": seconds.products,
            "attention": seconds.attention,
            "memory-bound": seconds.memory,
            "host": seconds.waiting,
            "recomputation": again,
            "tensor collectives": tensor,
            "context collectives": 3 * context + 0.0 * forward,
            "expert collectives": 2 * experts + 0.0 * forward,
            "shard collectives": whole.both - computing.both,
        }
        hidden = {
            "tensor collectives": behind,
            "context collectives": 3 * context * (1 / CONTEXT_EXPOSED - 1),
            "shard collectives": np.maximum(moving - (whole.both - computing.both), 0.0),
        }
        return replace(whole, weight=seconds.products / PRODUCTS), parts, hidden

    def _of_variants(self, role: str, *, in_float8: bool) -> BlockSeconds:
        works = [self.family.block(role, variant) for variant in ("tp", "sp")]
        if works[0] is works[1]:  # of a captured program, whose labels have decided
            return self._seconds(works[0], in_float8)
        tensor, sequence = (self._seconds(work, in_float8) for work in works)
        chosen = self.layouts.sequence_parallel
        return BlockSeconds(
            **{
                name: np.where(chosen, getattr(sequence, name), getattr(tensor, name))
                for name in BlockSeconds.__slots__
            }
        )

    def _seconds(self, work: BlockWork[Any], in_float8: bool) -> BlockSeconds:
        return block_seconds(
            work,
            self.machine.speeds,
            self.engine,
            in_float8=in_float8,
            fused=self.fused,
            is_split=self.layouts.tp > 1,
        )

    def _selective(self, seconds: BlockSeconds) -> Floats:
        return seconds.attention_forward if self.engine.selective == "attention" else seconds.forward / 2

    def _hidden(self, *, is_forward: bool) -> Floats:
        how = self.engine.tensor_overlap
        if how == "pipelined":  # needs activations that are split over the sequence
            return np.where(self.layouts.sequence_parallel, self.mechanisms.pipelined_hidden, 0.0)
        return np.asarray(self.mechanisms.async_hidden if how == "async" and not is_forward else 0.0)

    def _behind(self, *, is_forward: bool) -> Floats:
        """Hidden seconds of tensor collectives for each one that computing waits for."""
        hidden = self._hidden(is_forward=is_forward)
        return np.asarray(hidden / (1 - hidden))

    def _tensor_collectives(self, role: str) -> tuple[Floats, Floats]:
        """Seconds of a block's tensor collectives that computing waits for."""
        found = [np.zeros(1), np.zeros(1)]
        for variant, is_chosen in (("tp", 1 - self.layouts.sequence_parallel), ("sp", self.layouts.sequence_parallel)):
            for sent in self.family.block(role, variant).sent:
                if sent.of == "parameter":
                    continue
                spent = self.machine.links.seconds(sent.collective, sent.whole_bytes, *self._ranks(sent.mesh_dim))
                i = 0 if sent.is_forward else 1
                found[i] = found[i] + is_chosen * spent * (1 - self._hidden(is_forward=sent.is_forward))
        return found[0], found[1]

    def _ranks(self, mesh_dim: str) -> tuple[Floats, Floats]:
        """Ranks of a mesh dimension of labels, and how far apart they lie."""
        if mesh_dim == "dp":
            return self.layouts.dp, self.layouts.tp * self.layouts.cp
        one = np.ones(1)
        return next(
            ((n * one, by * one) for name, n, by in self.shape.tensor_dims if name == mesh_dim), (self.layouts.tp, one)
        )

    def _context(self, role: str) -> Floats:
        """Ring attention's passing on of keys and values, forward; a tenth is not hidden behind attention."""
        layouts = self.layouts
        kv_bytes = np.zeros(1)
        for one in self.family.block(role, "tp").products:
            if one.kind == "attention":
                kv_bytes = (
                    kv_bytes + 2 * self.shape.element_bytes * layouts.micro_batch * one.n * one.k * self._kv_heads(one)
                )
        spent = self.machine.links.seconds("all_gather", kv_bytes, layouts.cp, layouts.tp)
        return np.where(layouts.cp > 1, CONTEXT_EXPOSED * spent, 0.0)

    def _kv_heads(self, one: Any) -> Floats:
        return np.asarray(one.count / self.layouts.micro_batch)

    def _all_to_all(self) -> Floats:
        """Tokens to their experts and back, one pass: two all-to-alls over the expert ranks."""
        layouts, shape = self.layouts, self.shape
        tokens = layouts.micro_batch * shape.sequence / layouts.cp / np.where(layouts.sequence_parallel, layouts.tp, 1)
        moved = self.shape.element_bytes * tokens * shape.experts_per_token * shape.hidden
        spent = self.machine.links.seconds("all_to_all", moved * layouts.ep, layouts.ep, layouts.tp)
        return np.where(layouts.ep > 1, 2 * spent, 0.0)

    # ---- ZeRO 3 ----

    def _parameters(self, role: str) -> tuple[Floats, Floats]:
        work = self.family.block(role, "tp")
        ep = self.layouts.ep if role.startswith("moe_layer") else 1.0
        return np.asarray(work.parameters_split + work.parameters_whole), np.asarray(work.parameters_expert / ep)

    def _with_gathers(self, computing: Passes, role: str) -> tuple[Passes, Floats]:
        """Passes beside the collectives of ZeRO 2 and 3, and the seconds of those."""
        layouts, engine = self.layouts, self.engine
        shards = (layouts.zero >= 3) & (layouts.pp == 1)  # with stages, weights stay gathered for a step (torchtitan)
        if not np.any(shards | (layouts.zero == 2)):
            return computing, np.zeros(1)
        elements = sum(self._parameters(role))
        gather, scatter = self._gather_and_scatter(elements)
        copies = layouts.data_ranks / layouts.shard
        copy_sum = 2 * self.machine.links.seconds(
            "all_gather",
            engine.shard_gradient_bytes * elements / layouts.shard,
            copies,
            layouts.tp * layouts.shard,
        )
        again = np.where(shards, gather, 0.0)  # ZeRO 2 keeps what it gathered
        forward = self._beside(computing.forward, again)
        backward = self._beside(computing.backward, again + scatter + copy_sum)
        sums = shards | ((layouts.zero == 2) & (layouts.pp == 1))
        whole = Passes(
            forward=np.where(sums, forward, computing.forward), backward=np.where(sums, backward, computing.backward)
        )
        return whole, np.where(sums, 2 * again + scatter + copy_sum, 0.0)

    def _gather_and_scatter(self, elements: Any) -> tuple[Floats, Floats]:
        layouts, engine, links = self.layouts, self.engine, self.machine.links
        if engine.shard_gather == "blocking":  # through one port of a host
            one = elements / links.inter_host_bytes_per_s * np.where(layouts.shard > 1, 1.0, 0.0)
            return np.asarray(self.shape.element_bytes * one), np.asarray(engine.shard_gradient_bytes * one)
        return (
            links.seconds("all_gather", self.shape.element_bytes * elements, layouts.shard, layouts.tp),
            links.seconds("all_gather", engine.shard_gradient_bytes * elements, layouts.shard, layouts.tp),
        )

    def _beside(self, computing: Floats, moving: Floats) -> Floats:
        slow = BLOCKING_BESIDE if self.engine.shard_gather == "blocking" else self.machine.overlap_slowdown - 1
        return np.maximum(computing, moving) + slow * np.minimum(computing, moving)

    def end_gathers(self) -> Floats:
        """Embedding and head under ZeRO 3, one micro-batch; half hides behind the blocks next to them."""
        if not np.any(self.layouts.zero >= 3):
            return np.zeros(1)
        total = np.zeros(1)
        for role in ("first", "last"):
            gather, scatter = self._gather_and_scatter(sum(self._parameters(role)))
            total = total + (2 * gather + scatter) / 2
        return np.where((self.layouts.zero >= 3) & (self.layouts.pp == 1), total, 0.0)

    # ---- ends ----

    def end(self, role: str) -> Passes:
        """The block before, or after, all others, in 16 bits: heads are not computed in float8."""
        if role not in self.family.roles:
            return Passes(forward=np.zeros(1), backward=np.zeros(1))
        seconds = self._of_variants(role, in_float8=False)
        forward, backward = self._tensor_collectives(role)
        return Passes(
            forward=seconds.forward + forward,
            backward=seconds.backward + backward,
            weight=seconds.products / PRODUCTS,
        )

    def message(self) -> Floats:
        """Seconds that a rank waits for one message between stages, one way."""
        layouts, engine = self.layouts, self.engine
        size = self.shape.element_bytes * layouts.micro_batch * self.shape.sequence / layouts.cp * self.shape.hidden
        split = layouts.tp if engine.splits_messages else np.where(layouts.sequence_parallel, layouts.tp, 1)
        is_inside = layouts.num_devices <= self.machine.links.devices_per_host
        waits = self.mechanisms.message_exposed if engine.messages == "overlapped" else 1.0
        return np.where(layouts.pp > 1, waits * self.machine.links.message_s(size / split, is_inside), 0.0)

    # ---- data parallelism ----

    def state(self, per_rank: Floats) -> State:
        """Parameters of the rank that has the embedding."""
        dense, expert = np.zeros(1), np.zeros(1)
        for role, count in self.shape.counts:
            if np.any(count > 0):
                one, other = self._parameters(role)
                share = count / self.shape.blocks * per_rank
                dense, expert = dense + share * one, expert + share * other
        first = sum(self._parameters("first")) if "first" in self.family.roles else np.zeros(1)
        last = sum(self._parameters("last")) if "last" in self.family.roles else np.zeros(1)
        both = np.where(self.shape.is_tied, np.maximum(first, last), first + last)
        return State(dense=dense + np.where(self.layouts.pp > 1, np.maximum(first, last), both), expert=expert)

    def data_sums(self, state: State, window: Floats) -> Floats:
        """Seconds of gradient sums, and of gathering updated parameters, that the step waits for; not ZeRO 3's."""
        layouts, engine, links = self.layouts, self.engine, self.machine.links
        total = np.zeros(1)
        for elements, ranks in ((state.dense, layouts.data_ranks), (state.expert, layouts.data_ranks / layouts.ep)):
            ranks = np.maximum(ranks, 1)
            shard = np.minimum(layouts.shard, ranks)
            stride = layouts.tp * np.where(ranks < layouts.data_ranks, layouts.ep, 1)
            grads, weights = engine.gradient_bytes * elements, engine.parameter_bytes * elements
            total = total + links.seconds("all_gather", grads, shard, stride)
            total = total + np.where(
                layouts.zero >= 1,
                links.seconds("all_gather", weights, shard, stride),
                links.seconds("all_gather", grads, shard, stride),
            )
            total = total + 2 * links.seconds("all_gather", grads / shard, ranks / shard, stride * shard)
        moving = total
        if engine.gradient_sync == "during":
            left = np.maximum(total - self.mechanisms.gradient_window * window, 0.0)
            total = left + (self.machine.overlap_slowdown - 1) * np.minimum(total, window)
        if engine.parameter_sync == "broadcasts":
            total = total + np.where(layouts.zero >= 1, layouts.shard * self.mechanisms.broadcast_s, 0.0)
        own = (layouts.zero >= 2) & (layouts.pp == 1) | (layouts.data_ranks <= 1)
        self.hidden_sums = np.where(own, 0.0, np.maximum(moving - total, 0.0))
        return np.where(own, 0.0, total)

    def accumulation(self, state: State) -> Floats:
        """Adding each micro-batch's weight gradients to their sum, by a kernel of its own."""
        if self.engine.accumulation == "fused":
            return np.zeros(1)
        moved = (self.shape.element_bytes + 2 * self.engine.gradient_bytes) * (state.dense + state.expert)
        return np.asarray((self.layouts.micro_batches - 1) * moved / self.machine.speeds.bytes_per_s)

    def optimizer(self, state: State) -> Floats:
        layouts = self.layouts
        divided = np.where(layouts.zero >= 1, layouts.shard, 1.0)
        expert = np.where(layouts.zero >= 1, np.maximum(layouts.shard / layouts.ep, 1), 1.0)
        elements = state.dense / divided + state.expert / expert
        return np.asarray(self.engine.optimizer_bytes * elements / self.machine.speeds.bytes_per_s)
