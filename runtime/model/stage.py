"""`StageModule`: the parameters of one pipeline stage and how its calls run; without a pipeline there is one stage."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from autopar._torch import private
from autopar.ir.program import CallSite, Program
from autopar.ir.stages import Stage, owners, updated_by_inputs
from autopar.ir.storage import Storage, by_dtype
from autopar.lowering.experts import KeptChoices
from autopar.lowering.saved_on_host import saved_on_host
from autopar.runtime.codegen.execute import BlockFunction
from autopar.runtime.model.compiled import CompiledProgram
from autopar.runtime.model.zero import is_gathered, own_memory
from autopar.runtime.offload.host_memory import HostCopies
from autopar.runtime.parameters.placement import ComputeCopies, local_value, relayout
from autopar.runtime.profile.timeline import range_name


class CompiledSegment(nn.Module):
    """The parameters of one call of a block in training, gathered while code that needs them runs."""

    def __init__(self, names: Mapping[str, Storage], copies: ComputeCopies) -> None:
        super().__init__()
        self.names, self.copies = dict(names), copies

    def forward(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """`run` of this segment's parameters by name, and of the arguments."""
        local = {name: local_value(getattr(self, attribute(name)), s) for name, s in self.names.items()}
        params = {name: self.copies.of(name, value) for name, value in local.items()}
        return own_memory(run(params, *arguments), params) if is_gathered(self) else run(params, *arguments)


def attribute(name: str) -> str:
    """The name of a parameter or buffer as an attribute of the module that holds it, which no method has."""
    return f"{name.replace('.', '__')}__held"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a stage runs one micro-batch of a step: the code of its blocks, buffers that change, and calls apart."""

    compiled: CompiledProgram
    functions: Sequence[BlockFunction]
    selective: Callable[[int], BlockFunction]
    outputs: bool  # of all the model's outputs, without a backward pass
    state: Mapping[str, torch.Tensor]
    when: tuple[int, int]  # step and micro-batch
    copies: HostCopies
    stops_early: bool  # recomputation at the last value needed; compiled blocks cannot (`fullgraph`)


class StageModule(nn.Module):
    """A segment for every call, of one dtype, then those of experts and second dtypes, and what several calls take."""

    def __init__(
        self,
        program: Program,
        stage: Stage,
        held: Mapping[str, Storage],
        fill: Callable[[nn.Module, Mapping[str, Storage]], None],
    ) -> None:
        super().__init__()
        self.index, self.placements = stage.index, held
        owner_by_name = owners(program, stage.calls)
        self.segment_of = dict[str, int]()
        self.segments = nn.ModuleList()
        self.copies = ComputeCopies({name: info.dtype for name, info in program.every_parameter.items()})
        own_of = [{name: held[name] for name, at in owner_by_name.items() if at == k} for k in range(len(stage.calls))]
        infos = program.every_parameter
        others = list[list[str]]()
        for members in own_of:
            experts = by_dtype((name for name, s in members.items() if s.is_of_experts), infos)
            first, *more = by_dtype((name for name, s in members.items() if not s.is_of_experts), infos) or [[]]
            self._add_segment(first, fill)
            others += [*more, *experts]
        for group in others:
            self._add_segment(group, fill)
        shared = [name for name, at in owner_by_name.items() if at is None]
        unused = program.unused if stage.index == 0 else ()
        first, *more = by_dtype(shared, infos) or [[]]
        self.shared = {name: held[name] for name in (*first, *unused)}
        self.shared_segments = range(len(self.segments), len(self.segments) + len(more))
        for group in more:
            self._add_segment(group, fill)
        fill(self, self.shared)

    def _add_segment(self, names: Sequence[str], fill: Callable[[nn.Module, Mapping[str, Storage]], None]) -> None:
        segment = CompiledSegment(named := {name: self.placements[name] for name in names}, self.copies)
        fill(segment, named)
        self.segment_of |= dict.fromkeys(names, len(self.segments))
        self.segments.append(segment)

    def owner_of(self) -> dict[str, nn.Module]:
        """The module that holds each parameter of this stage."""
        return dict.fromkeys(self.shared, self) | {name: self.segments[at] for name, at in self.segment_of.items()}

    def forward(self, what: Callable[[], Execution], received: dict[str, Any]) -> dict[str, Any]:
        """Run the calls of a stage. `what` is a function, because FSDP2 searches arguments for tensors."""
        names = list[str]()

        def named(params: Mapping[str, torch.Tensor], *arguments: Any) -> tuple[Any, ...]:
            results = self._run(params, *arguments)
            names.extend(results)
            return tuple(results.values())

        run: Callable[..., tuple[Any, ...]] = named
        for at in self.shared_segments:
            run = _within(self.segments[at], run)
        return dict(zip(names, run({}, what, received), strict=True))

    def _run(
        self, params: Mapping[str, torch.Tensor], what: Callable[[], Execution], received: Mapping[str, Any]
    ) -> dict[str, Any]:
        run = what()
        compiled = run.compiled
        program, stage = compiled.program, compiled.stages[self.index]
        held = {
            name: self.copies.of(name, local_value(getattr(self, attribute(name)), s))
            for name, s in self.shared.items()
        }
        shared = {n: self._taken(compiled, n, v) for n, v in {**held, **params}.items() if n in stage.parameters}
        scope: dict[str, Any] = {**dict.fromkeys(stage.parameters), **shared, **compiled.constants(), **run.state}
        scope |= received
        results_of = compiled.results_of(outputs=run.outputs)
        for index in sorted((*stage.again, *stage.calls)):
            call = program.calls[index]
            is_again = index in stage.again
            read = scope.get if is_again else scope.__getitem__
            arguments = [read(a) if isinstance(a, str) else a for a in call.arguments]
            values = self._function(run, index, stage)(*arguments)
            scope.update(zip(stage.again[index] if is_again else results_of(call), values, strict=True))
        leaving = {*stage.sends, program.loss, *(program.outputs if run.outputs else program.updates).values()}
        out = {name: scope[name] for name in leaving if name in scope and name not in shared}
        return dict(zip(out, own_memory([*out.values()], shared), strict=True)) if is_gathered(self) else out

    def _function(self, run: Execution, index: int, stage: Stage) -> BlockFunction:
        compiled, call = run.compiled, run.compiled.program.calls[index]
        kept = stage.again.get(index)
        function: BlockFunction = run.functions[call.block]
        mode, streams = None if run.outputs else compiled.recomputed.get(index), compiled.streams
        training = streams.training
        if kept is not None:
            function = compiled.partial_module(call.block, _outputs(compiled, call, kept))
        elif mode == "selective":
            function = run.selective(call.block)

        def inner(held: Mapping[str, torch.Tensor], *arguments: Any) -> Any:
            name = range_name(call.path, index, stage.index, run.when[1])
            with record_function(name) if private.is_profiling() else nullcontext():
                pairs = zip(call.arguments, arguments, strict=True)
                streams.begin(*run.when, index, training=training)
                filled = [
                    self._taken(compiled, a, held[a]) if isinstance(a, str) and a in held else v for a, v in pairs
                ]
                return function(*filled)

        outer: Callable[..., Any] = _recomputing(inner, run.stops_early) if mode == "full" else inner
        if index in compiled.offloaded and not run.outputs:
            outer = _offloading(outer, run, call)
        for segment in self._segments_of(call):
            outer = _within(segment, outer)
        return lambda *arguments: outer({}, *arguments)

    def _taken(self, compiled: CompiledProgram, name: str, value: torch.Tensor) -> torch.Tensor:
        """A parameter as a program takes it."""
        if name not in compiled.used:
            return value
        return relayout(value, self.placements[name], compiled.used[name], compiled.mesh)

    def _segments_of(self, call: CallSite) -> list[nn.Module]:
        """The segments that hold a call's parameters: one in the training step, perhaps several in another capture."""
        segments = {self.segment_of[a]: None for a in call.arguments if isinstance(a, str) and a in self.segment_of}
        return [self.segments[at] for at in segments if at not in self.shared_segments]


def _outputs(compiled: CompiledProgram, call: CallSite, results: Sequence[str]) -> tuple[str, ...]:
    """The block's own names of some results of a call."""
    pairs = zip(compiled.program.blocks[call.block].outputs, call.results, strict=True)
    return tuple(output for output, result in pairs if result in results)


def _recomputing(run: Callable[..., Any], stops_early: bool) -> Callable[..., Any]:
    """`run` whose inner values the backward pass computes again. Random streams restart with every call."""
    choices = KeptChoices()

    def with_choices(params: Mapping[str, torch.Tensor], *arguments: Any) -> Any:
        with choices:
            return run(params, *arguments)

    return partial(checkpoint, with_choices, use_reentrant=False, preserve_rng_state=False, early_stop=stops_early)


def _offloading(run: Callable[..., Any], execution: Execution, call: CallSite) -> Callable[..., Any]:
    """`run` whose saved tensors wait on the host for the backward pass."""

    def outer(params: Mapping[str, torch.Tensor], *arguments: Any) -> Any:
        given = zip(call.arguments, arguments, strict=True)
        stays = [value for name, value in given if name in execution.compiled.stays]
        with saved_on_host(execution.copies, (*params.values(), *stays)):
            return run(params, *arguments)

    return outer


def _within(segment: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with a segment's parameters gathered and added to those it is given."""

    def outer(params: Mapping[str, torch.Tensor], *arguments: Any) -> Any:
        return segment(lambda more, *inner: run({**params, **more}, *inner), *arguments)

    return outer


class OldBuffers:
    """Copies of buffers for the micro-batches of a step: the backward pass needs the values before an update."""

    def __init__(self, program: Program, *, per_micro_batch: bool) -> None:
        self._changing = frozenset(program.updates) if per_micro_batch else updated_by_inputs(program)
        self._held: dict[str, torch.Tensor] = {}

    def of(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The value of a buffer for a micro-batch. `value` is the present one."""
        if name in self._changing:
            return value.clone()
        if name not in self._held:
            self._held[name] = value.clone()
        return self._held[name]

    def clear(self) -> None:
        """Begin a step."""
        self._held.clear()
