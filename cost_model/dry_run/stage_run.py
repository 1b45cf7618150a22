"""One micro-batch of one pipeline stage on one rank, run on tensors without data: its saved tensors and gradients.

The blocks are those that the runtime generates (`autopar.lowering.local_graph`) at the plan's local shapes, the calls,
segments and recomputed values those of `autopar.runtime.model.stage`; torch's own autograd and its checkpoint run them
under fake tensors. So early stops of a recomputation, views, and which gradients flow are what they are in a step.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from autopar._torch import private
from autopar.capture.nodes import value_infos
from autopar.cost_model.dry_run.rank_view import RankView
from autopar.ir.precision import is_low
from autopar.ir.program import CallSite
from autopar.ir.stages import Stage, kept_results, needed_results, num_averaged, values_that_stay
from autopar.lowering.experts import KeptChoices
from autopar.lowering.local_graph import local_graph
from autopar.lowering.recomputation import SelectiveBlock
from autopar.lowering.saved_on_host import saved_on_host

_Values = dict[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class StageRun:
    """The result of one micro-batch of a stage on a rank. Parameters, inputs and constants do not count."""

    saved_bytes: int  # kept from forward to backward on the device, each storage once
    kept_bytes: int  # of them, between the two parts of a backward pass
    peak_bytes: int  # the most that the micro-batch makes; of gradients, the one that was just computed
    gradient_peak_bytes: int  # as the peak, but every gradient counts from its making on, as the rank stores it
    gradients: frozenset[str]
    flows: frozenset[int]  # the calls with a gradient
    moved_bytes: int = 0  # saved tensors that go to the host in the forward pass
    fetched_bytes: int = 0  # and come back in the backward pass


def run_stage(setting: RankView, stage: Stage) -> StageRun:
    """Forward and backward of one micro-batch of a stage, backward in parts too where the schedule has it so."""
    with private.fake_tensors():
        return StageRunner(setting).stage(stage)


# Stand-ins for other ranks and random streams: tensors without data.


@dataclass(frozen=True, eq=False)
class SilentDim:
    """A mesh dimension of generated code (a `Communicator`) that sends nothing."""

    name: str
    degree: int
    coordinate: int

    def __repr__(self) -> str:
        return f"<{self.name}: {self.degree} ranks>"

    def index(self) -> int:
        return self.coordinate

    def apply(self, x: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(self.coordinate, x)

    def all_reduce(self, x: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def start_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((x.shape[0] * self.degree, *x.shape[1:]))

    def start_reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((x.shape[0] // self.degree, *x.shape[1:]))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def exchange(self, x: torch.Tensor, to: int) -> torch.Tensor:
        return torch.empty_like(x)

    def start_shift(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def all_to_all_rows(self, x: torch.Tensor, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """As many rows come as go: the expected number."""
        return torch.empty_like(x)

    def to_host(self, counts: torch.Tensor) -> torch.Tensor:
        return counts

    def rows_of_part(self, x: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """An even part: the expected number of rows."""
        return x[0, : x.shape[1] // self.degree]

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        return x


class NoNumbers:
    """Random streams without numbers: drawn tensors have the right shape, saved tensors the right size."""

    training = True

    def position(self) -> None:
        """No draw depends on anything."""

    def go_to(self, position: None) -> None:
        """Nothing to go back to."""

    def keep_mask(self, x: torch.Tensor, probability: float) -> torch.Tensor:
        return torch.empty_like(x, dtype=torch.bool)

    def run(self, operator: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        return operator(*args, **kwargs)


class _Kept:
    """A tensor that autograd keeps; without its graph, else a result would keep the operator that keeps it."""

    def __init__(self, tensor: torch.Tensor, holders: Counter[int]) -> None:
        self.tensor, self.holders, self.at = tensor.detach(), holders, private.storage_id(tensor)
        holders[self.at] += 1

    def __del__(self) -> None:
        self.holders[self.at] -= 1


class SavedBytes:
    """Counts the storages that autograd saves inside this context, without the storages of the `outside` tensors."""

    def __init__(self, outside: Sequence[Any]) -> None:
        self._outside = {private.storage_id(value) for value in outside if isinstance(value, torch.Tensor)}
        self._holders, self._sizes = Counter[int](), dict[int, int]()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

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

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)


class _CountedCopies:
    """Copies to the host and back that move nothing."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.bytes_to_host = self.bytes_to_device = 0

    def to_host(self, value: torch.Tensor) -> tuple[int, torch.dtype]:
        self.bytes_to_host += value.numel() * value.element_size()
        return value.numel(), value.dtype

    def to_device(self, host: tuple[int, torch.dtype]) -> torch.Tensor:
        size, dtype = host
        self.bytes_to_device += size * dtype.itemsize
        return torch.empty(size, dtype=dtype)


class StageRunner:
    """The blocks of one rank."""

    def __init__(self, setting: RankView) -> None:
        self.setting = setting
        self.program, self.plan = setting.program, setting.plan
        self.kept = needed_results(self.program)
        self.modules: dict[tuple[int, tuple[str, ...]], fx.GraphModule] = {}
        self.selective_blocks: dict[int, SelectiveBlock] = {}
        self.infos = value_infos(self.program)
        self.stays = values_that_stay(self.program, setting.offloaded)

    def module(self, index: int, keep: Sequence[str]) -> fx.GraphModule:
        key = (index, tuple(keep))
        if key not in self.modules:
            setting, mesh = self.setting, self.plan.mesh
            block, labels = self.program.blocks[index], self.plan.blocks[index]
            made = local_graph(
                setting.analysis,
                block,
                index,
                labels,
                mesh,
                device="cpu",
                keep=keep,
                regather=self.plan.regather,
                fuse=True,
                loss_chunks=self.plan.degrees.loss_chunks,
            )
            root = torch.nn.Module()
            for name in made.streams:
                setattr(root, name, NoNumbers())
            for name in made.mesh_dims:
                at = 0
                for i in mesh.indices(name):
                    at = at * mesh.degrees[i] + setting.coordinates[mesh.names[i]]
                setattr(root, name, self.mesh_dim(name, mesh.degree_of(name), at))
            self.modules[key] = fx.GraphModule(root, made.graph, f"Block{index}")
        return self.modules[key]

    def mesh_dim(self, name: str, degree: int, coordinate: int) -> SilentDim:
        return SilentDim(name, degree, coordinate)

    def given(self) -> _Values:
        """This rank's part of a micro-batch, constants, buffers that forward changes, and the loss's denominator."""
        program, dp = self.program, self.plan.degrees.dp
        values: _Values = {}
        for info in program.inputs:
            shape = [n // dp if d == info.batch_dim else n for d, n in enumerate(info.shape)]
            values[info.name] = torch.empty(shape, dtype=info.dtype)
        outputs: Any = program.constants.graph.output_node().args[0]
        known = dict(zip(program.constants.results, (node.meta["info"] for node in outputs), strict=True))
        for name in program.updates:
            known[name] = next(i for n, i in program.buffers.items() if name in (n, *i.aliases))
        known |= {name: self.infos[name] for name in program.denominators}
        return values | {name: torch.empty(info.shape, dtype=info.dtype) for name, info in known.items()}

    def parameters(self, stage: Stage) -> tuple[_Values, dict[str, torch.Tensor]]:
        """The parameters of a stage as blocks take them, and as they are held while gathered."""
        taken: _Values = {}
        leaves: dict[str, torch.Tensor] = {}
        for name in stage.parameters:
            info, storage = self.program.parameters[name], self.setting.storages[name]
            shape = self.setting.own_shape(name)
            value = leaves[name] = torch.empty(shape, dtype=info.dtype, requires_grad=info.requires_grad)
            for _, dim, size in storage.uneven():
                if missing := size - value.shape[dim]:
                    pads = [0, 0] * (value.dim() - 1 - dim) + [0, missing]
                    value = torch.ops.aten.constant_pad_nd.default(value, pads)
            taken[name] = value.reshape(storage.local_shape) if value.shape != storage.local_shape else value
        return taken, leaves

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
        taken, leaves = self.parameters(stage)
        own: set[str] = set()
        given = self.given()
        outside = [*leaves.values(), *given.values()]
        self.copies = _CountedCopies()
        with private.LiveStorages(outside) as live, SavedBytes(outside) as saved:
            for name, leaf in leaves.items():
                if leaf.requires_grad:
                    leaf.register_post_accumulate_grad_hook(partial(self.let_go, name, own, live))
            self.saved = saved
            received = {name: self.received(name) for name in stage.receives}
            found = self.forward(stage, {**taken, **given, **received})
            saved_bytes = saved.bytes()
            is_last = stage.index == len(self.setting.stages) - 1
            leaving = [found[self.program.loss]] if is_last else [found[name] for name in stage.sends]
            flows = frozenset(i for i, value in self.made.items() if value)
            del found
            kept_bytes = 0
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
            flows=flows,
            moved_bytes=self.copies.bytes_to_host,
            fetched_bytes=self.copies.bytes_to_device,
        )

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

    def received(self, name: str) -> torch.Tensor:
        info, shape = self.infos[name], self.setting.local_shape(name)
        return torch.empty(shape, dtype=info.dtype, requires_grad=info.differentiable)

    def forward(self, stage: Stage, scope: _Values) -> _Values:
        """The calls of a stage in order, as `autopar.runtime.model.stage.StageModule` runs them."""
        self.made: dict[int, bool] = {}
        for index in sorted((*stage.again, *stage.calls)):
            call, again = self.program.calls[index], stage.again.get(index)
            arguments = [scope.get(a) if isinstance(a, str) else a for a in call.arguments]
            values = self.function(call, index, again)(*arguments)
            results = kept_results(self.program, call, self.kept[call.block]) if again is None else again
            scope.update(zip(results, values, strict=True))
            if again is None:
                self.made[index] = any(value.requires_grad for value in values)
        if stage.index == len(self.setting.stages) - 1:
            loss = scope[self.program.loss]
            wide = loss.float() if is_low(loss.dtype) else loss
            scope[self.program.loss] = wide / num_averaged(self.program, self.plan.degrees)
        return scope

    def function(self, call: CallSite, index: int, again: tuple[str, ...] | None) -> Callable[..., Any]:
        if again is None:
            module = self.module(call.block, self.kept[call.block])
        else:
            pairs = zip(self.program.blocks[call.block].outputs, call.results, strict=True)
            module = self.module(call.block, [o for o, r in pairs if r in again])
        how = self.setting.recomputed.get(index)
        run: Callable[..., Any] = module
        if how == "selective":
            if call.block not in self.selective_blocks:
                self.selective_blocks[call.block] = SelectiveBlock(module, self.plan.blocks[call.block].recomputed)
            run = self.selective_blocks[call.block]
        elif how == "full":
            run = partial(self.checkpointed, module, call)
        return partial(self.offloading, run, call) if index in self.setting.offloaded else run

    def offloading(self, run: Callable[..., Any], call: CallSite, *arguments: Any) -> Any:
        """A call whose saved tensors wait on the host."""
        stays = [value for name, value in zip(call.arguments, arguments, strict=True) if name in self.stays]
        with saved_on_host(self.copies, stays, self.saved.pack, self.saved.unpack):
            return run(*arguments)

    def checkpointed(self, module: fx.GraphModule, call: CallSite, *arguments: Any) -> Any:
        """A call whose inner values the backward pass computes again. Its own parameters do not count as saved."""
        own = {k: v for k, v in enumerate(arguments) if call.arguments[k] in self.program.parameters}
        others = [v for k, v in enumerate(arguments) if k not in own]
        choices = KeptChoices(self.saved.pack, self.saved.unpack)

        def run(*given: Any) -> Any:
            rest = iter(given)
            with choices:
                return module(*(own[k] if k in own else next(rest) for k in range(len(arguments))))

        return checkpoint(run, *others, use_reentrant=False, preserve_rng_state=False)
