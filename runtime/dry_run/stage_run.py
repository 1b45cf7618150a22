"""One micro-batch of one pipeline stage on one rank, run on tensors without data: its saved tensors and gradients.

The stage is a `StageModule` of the runtime, with its generated code at the plan's local shapes. torch's own autograd
and its checkpoint run it under fake tensors. So early stops of a recomputation, views, and which gradients flow are
what they are in a step.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar._torch import private
from autopar.capture.nodes import output_nodes, value_infos
from autopar.ir.stages import Stage, num_averaged
from autopar.lowering.recomputation import SelectiveBlock
from autopar.runtime.dry_run.rank_view import RankView
from autopar.runtime.model.outputs import at_least_float32
from autopar.runtime.model.stage import CompiledSegment, Execution, StageModule, attribute
from autopar.runtime.offload.host_memory import HostCopies

_Values = dict[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class StageRun:
    """The result of one micro-batch of a stage on a rank. Parameters, inputs and constants do not count."""

    saved_bytes: int  # kept from forward to backward on the device, each storage once
    kept_bytes: int  # of them, between the two parts of a backward pass
    peak_bytes: int  # the most that the micro-batch makes; of gradients, the one that was just computed
    gradient_peak_bytes: int  # as the peak, but every gradient counts from its making on, as the rank stores it
    gradients: frozenset[str]
    flows: frozenset[str]  # the parameters of calls with a gradient
    moved_bytes: int = 0  # saved tensors that go to the host in the forward pass
    fetched_bytes: int = 0  # and come back in the backward pass


def run_stage(setting: RankView, stage: Stage) -> StageRun:
    """Forward and backward of one micro-batch of a stage, backward in parts too where the schedule has it so."""
    with private.fake_tensors():
        return StageRunner(setting).stage(stage)


class _Kept:
    """A tensor that autograd keeps; without its graph, else a result would keep the operator that keeps it."""

    def __init__(self, tensor: torch.Tensor, holders: Counter[int]) -> None:
        self.tensor, self.holders, self.at = tensor.detach(), holders, private.storage_id(tensor)
        holders[self.at] += 1

    def __del__(self) -> None:
        self.holders[self.at] -= 1


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the storages that autograd saves inside this context, without the storages of the `outside` tensors."""

    def __init__(self, outside: Sequence[Any]) -> None:
        super().__init__(self.pack, self.unpack)
        self._outside = {private.storage_id(value) for value in outside if isinstance(value, torch.Tensor)}
        self._holders, self._sizes = Counter[int](), dict[int, int]()

    def bytes(self) -> int:
        """Bytes of the saved storages, each counted once."""
        return sum(self._sizes[at] for at, holders in self._holders.items() if holders)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What is saved instead of a tensor."""
        at = private.storage_id(tensor)
        if at in self._outside:
            return tensor
        self._sizes[at] = tensor.untyped_storage().nbytes()
        return _Kept(tensor, self._holders)

    @staticmethod
    def unpack(kept: Any) -> torch.Tensor:
        """The tensor of what `pack` gave."""
        found: torch.Tensor = kept.tensor if isinstance(kept, _Kept) else kept
        return found


class _UncountedHost(HostCopies):
    """Copies to host memory that is not memory of the device: it is on meta."""

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, device="meta")


class StageRunner:
    """The blocks of one rank."""

    def __init__(self, setting: RankView) -> None:
        self.setting, self.program = setting, setting.program
        modules, labels = setting.code_modules(outputs=False), setting.plan.blocks
        blocks = {self.program.calls[i].block for i, how in setting.recomputed.items() if how == "selective"}
        self.selective = {block: SelectiveBlock(modules[block], labels[block].recomputed) for block in blocks}

    def given(self) -> _Values:
        """This rank's part of a micro-batch, constants, buffers that forward changes, and the loss's denominator."""
        program, dp, infos = self.program, self.setting.plan.degrees.dp, value_infos(self.program)
        values: _Values = {}
        for info in program.inputs:
            shape = [n // dp if d == info.batch_dim else n for d, n in enumerate(info.shape)]
            values[info.name] = torch.empty(shape, dtype=info.dtype)
        outputs = output_nodes(program.constants.graph)
        known: _Values = dict(zip(program.constants.results, (node.meta["info"] for node in outputs), strict=True))
        for name in program.updates:
            known[name] = next(i for n, i in program.buffers.items() if name in (n, *i.aliases))
        known |= {name: infos[name] for name in program.denominators}
        return values | {name: torch.empty(info.shape, dtype=info.dtype) for name, info in known.items()}

    def fill(self, module: nn.Module, names: Iterable[str]) -> None:
        """Give a module its parameters as they are while they are gathered."""
        for name in names:
            info = self.program.every_parameter[name]
            value = torch.empty(self.setting.own_shape(name), dtype=info.dtype)
            module.register_parameter(attribute(name), nn.Parameter(value, requires_grad=info.requires_grad))

    def stage(self, stage: Stage) -> StageRun:
        whole = self.micro_batch(stage)
        if not self.setting.splits_backward(stage):
            return whole
        parts = self.micro_batch(stage, in_parts=True)
        return replace(
            whole,
            kept_bytes=parts.kept_bytes,
            peak_bytes=max(whole.peak_bytes, parts.peak_bytes),
            fetched_bytes=parts.fetched_bytes,
        )

    def micro_batch(self, stage: Stage, *, in_parts: bool = False) -> StageRun:
        module = StageModule(self.program, stage, self.setting.placements, self.fill)
        own, flows, copies = set[str](), set[str](), _UncountedHost(self.setting.device)

        def note(segment: CompiledSegment, _: object, results: Iterable[torch.Tensor]) -> None:
            if any(value.requires_grad for value in results):
                flows.update(segment.names)

        for segment in module.segments:
            segment.register_forward_hook(note)
        leaves = {n: getattr(holder, attribute(n)) for n, holder in module.owner_of().items()}
        given = self.given()
        outside = [*leaves.values(), *given.values()]
        saved = SavedBytes(outside)
        with private.LiveStorages(outside) as live, saved:
            for name, leaf in leaves.items():
                if leaf.requires_grad:
                    leaf.register_post_accumulate_grad_hook(partial(self.let_go, name, own, live))
            received = dict(zip(stage.receives, self.setting.empty_values(stage.receives, "cpu"), strict=True))
            leaving = self.forward(module, {**given, **received}, copies)
            saved_bytes, kept_bytes = saved.bytes(), 0
            if in_parts:
                kept_bytes = self.backward_in_parts(leaving, list(received.values()), list(leaves.values()), saved)
            else:
                self.backward(leaving)
        own |= {name for name, leaf in leaves.items() if leaf.grad is not None}
        return StageRun(
            saved_bytes=saved_bytes,
            kept_bytes=kept_bytes,
            peak_bytes=live.peak_bytes,
            gradient_peak_bytes=max(live.peak_with_more_bytes, live.more_bytes),
            gradients=frozenset(own),
            flows=frozenset(flows),
            moved_bytes=copies.bytes_to_host,
            fetched_bytes=copies.bytes_to_device,
        )

    def forward(self, module: StageModule, values: _Values, copies: HostCopies) -> list[torch.Tensor]:
        """A stage's forward pass in the runtime. Returns the values that it sends, or the loss."""
        setting = self.setting
        execution = Execution(
            compiled=setting,
            functions=setting.code_modules(outputs=False),
            selective=self.selective.__getitem__,
            outputs=False,
            state={},
            when=(0, 0),
            copies=copies,
            stops_early=True,
        )
        results, stage = module(lambda: execution, values), setting.stages[module.index]
        if module.index == len(setting.stages) - 1:
            return [at_least_float32(results[self.program.loss]) / num_averaged(self.program, setting.plan.degrees)]
        return [results[name] for name in stage.sends]

    def let_go(self, name: str, found: set[str], live: private.LiveStorages, leaf: torch.Tensor) -> None:
        """A parameter's gradient is there, and is let go."""
        found.add(name)
        live.more_bytes += self.setting.gradient_bytes(name)
        leaf.grad = None

    def backward(self, leaving: list[torch.Tensor]) -> None:
        flowing = [value for value in leaving if value.requires_grad]
        leaving.clear()
        if flowing:
            torch.autograd.backward(flowing, [torch.empty_like(value) for value in flowing])

    def backward_in_parts(
        self, leaving: list[torch.Tensor], received: list[torch.Tensor], weights: list[torch.Tensor], saved: SavedBytes
    ) -> int:
        """The backward pass for received values, then for weights; returns the bytes saved between the two parts."""
        sent = [v.clone() if v._is_view() or v.is_leaf else v for v in leaving]  # torch detaches them in place
        leaving.clear()
        rest = private.backward_of_inputs(sent, [torch.empty_like(v) for v in sent], received, weights)
        kept = saved.bytes()
        private.backward_of_weights(weights, rest)
        return kept
