"""`RunningModel`: how one rank runs the stages that it holds, one micro-batch after another."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from autopar.errors import PlanError, RuntimeInputError
from autopar.ir.offload import PARAMETERS
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.stages import needs_denominator, num_averaged
from autopar.lowering.recomputation import SelectiveBlock
from autopar.runtime.checkpoint.saving import Saver
from autopar.runtime.codegen.randomness import Streams, seed_from
from autopar.runtime.distributed.hang_report import Place
from autopar.runtime.distributed.mesh import RankMesh, training_mesh
from autopar.runtime.model import zero
from autopar.runtime.model.compiled import CompiledProgram
from autopar.runtime.model.inputs import (
    batch_error,
    first_rows,
    pad_batch,
    read_batch,
    sequences_to_run,
    split_micro_batches,
)
from autopar.runtime.model.original_model import OriginalModel
from autopar.runtime.model.outputs import as_dtensor, at_least_float32, refuse_autocast
from autopar.runtime.model.pipeline import Pipeline
from autopar.runtime.model.preflight_check import EVALUATION, STEP, PreflightCheck, shards_of
from autopar.runtime.model.shape_cache import Pieces, Replan, ShapeCache, Wanted
from autopar.runtime.model.sharded_model import ShardedModel
from autopar.runtime.model.stage import Execution, OldBuffers, StageModule
from autopar.runtime.offload.backward_step import BackwardStep
from autopar.runtime.offload.state_files import keep_state_in_files
from autopar.runtime.parameters.gradients import Unsummed, are_waiting, marked
from autopar.runtime.parameters.shown_tensor import parts_of

COMPARED = (1, 10)  # numbers of steps after which the ranks compare their weights
MicroBatches = list[dict[str, Any]]
Functions = Callable[[CompiledProgram, bool], Sequence[Callable[..., Any]]]  # the code of blocks, perhaps with outputs


class RunningModel(ShardedModel):
    """The parts of a step, which `ParallelModel` joins. `replan` captures again, `origin` is the unmodified model."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        source: Callable[[str], torch.Tensor],
        device: torch.device,
        *,
        seed: int = 0,
        replan: Replan | None = None,
        buffers: Callable[[str], torch.Tensor] | None = None,
        streams: Callable[[RankMesh], Streams] | None = None,
        origin: OriginalModel | None = None,
        sent: bool = False,
    ) -> None:
        mesh = training_mesh(plan.degrees, device.type)
        drawing = Streams(mesh.dims, seed, device) if streams is None else streams(mesh)
        super().__init__(program, plan, mesh, source, device, drawing, buffers or source, sent)
        self._compile: Callable[[Any], Any] | None = None  # `torch.compile` with its options
        self._step = self._num_steps = 0  # of the training, and of this object
        self.num_trained = (0, 0)  # samples and tokens of the training steps of all ranks so far
        self._sums = True  # whether a backward pass ends with the sums over ranks
        self._unsummed: Unsummed | None = None  # gradients of earlier calls that wait for their sums
        self._earlier: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients of the calls before a backward pass
        self._fillers: dict[str, torch.Tensor] = {}
        self._saver = Saver()
        self._origin = origin
        self._preflight = PreflightCheck(mesh, program.inputs, self._saver)
        self.place = Place(degrees=plan.degrees, pipeline=mesh.pipeline)
        self._old_buffers = OldBuffers(program, per_micro_batch=plan.degrees.per_micro_batch)
        self._shapes = ShapeCache(self.base, replan)

    def code_modules(self, *, outputs: bool) -> list[fx.GraphModule]:
        """The generated code of every distinct block; with `outputs` it keeps all outputs of the model."""
        return self.base.code_modules(outputs=outputs)

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """The integers of all ranks, at most 7 + 2 × inputs of each, padded with zeros. Collective."""
        return self._preflight.exchange(row)

    # Optimizers.

    def step_in_backward(
        self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> Mapping[str, torch.optim.Optimizer]:
        """Update every parameter in the backward pass, as soon as its gradient is final. There is no `step()` then.

        Updates have equal bits. They run beside the backward pass if the plan keeps the optimizer or the parameters on
        the host. Gradients do not wait in memory for a step.

        Args:
            make: A function that makes an optimizer of the parameters in a list, such as
                ``lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)``. It is called for each parameter.

        Returns:
            The optimizers by parameter name, for their learning rates and their state.

        Raises:
            RuntimeInputError: The update of an element depends on more than its own gradient, or the parameters step
                in the backward pass already. `clip_grad_norm_` raises from now on.

        Example:
            >>> from copy import deepcopy
            >>> made = deepcopy(parallel).step_in_backward(lambda own: torch.optim.SGD(own, lr=0.1))
            >>> list(made)
            ['0.weight', '0.bias', '2.weight', '2.bias']
        """
        if self._backward_step is not None:
            raise RuntimeInputError("the parameters step in the backward pass already; change the optimizers it gave")
        early = dict[nn.Parameter, str]()
        late = {p for _, parameters in self._deferred() for p in parameters}
        for name, parameter in self.named_parameters():
            here = self._computed.get(name) if self.plan.degrees.pp == 1 else None  # None too if it has several parts
            is_apart = self._on_host is not None or (
                self.plan.degrees.offloads(PARAMETERS) and here is not None and zero.is_zero_sharded(here)
            )
            if here is not None and parameter.requires_grad and is_apart and here not in late:
                early[here] = name
        on_host = self._on_host
        take: Callable[[str], None] = (lambda _: None) if on_host is None else lambda n: on_host.take_gradients([n])
        self._backward_step = BackwardStep(make, dict(self.named_parameters()), early, take)
        return self._backward_step.optimizers

    def keep_state_in_files(self, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> int:
        """Keep an optimizer's state in a memory-mapped file instead of anonymous memory, with equal bits.

        The file has its disk space when this returns, and no name. The kernel moves its pages between disk and memory.

        Args:
            optimizer: An optimizer of this model's parameters, which lie on the host.
            folder: An existing folder on the disk that shall hold the state, such as an NVMe disk of this host.

        Returns:
            The bytes that this rank's file takes on the disk.

        Raises:
            InputError: The folder does not exist, or has too little room.
            RuntimeInputError: The parameters lie on a device; the plan needs offload optimizer or parameters.

        Example:
            >>> import tempfile
            >>> optimizer = torch.optim.AdamW(parallel.parameters())
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     parallel.keep_state_in_files(optimizer, folder) > 0
            True
        """
        return keep_state_in_files(optimizer, folder)

    def _functions(self, compiled: CompiledProgram, outputs: bool) -> Sequence[Callable[..., Any]]:
        """What runs the distinct blocks: generated code, or what `torch.compile` made of it."""
        modules, wrap = compiled.code_modules(outputs=outputs), self._compile
        if wrap is None:
            return modules
        return compiled.once(("functions", wrap, outputs), lambda: list(map(wrap, modules)))

    def _begin_backward(self) -> None:
        if not are_waiting(self._unsummed):
            self._earlier = self._set_aside()

    @torch.no_grad()
    def _end_backward(self, *, sums: bool) -> None:
        """Sum gradients over ranks. Without `sums` they wait for the next backward pass."""
        self._unsummed = None if sums else marked(p for _, some in self._deferred() for p in some)
        if sums:
            self._sum_deferred()
            self._show_gradients(self._earlier)
            self._earlier = []

    def _execution(
        self,
        compiled: CompiledProgram,
        functions: Sequence[Callable[..., Any]],
        when: tuple[int, int],
        *,
        outputs: bool,
    ) -> Execution:
        return Execution(
            compiled=compiled,
            functions=functions,
            selective=partial(self._selective, compiled),
            outputs=outputs,
            state={name: self._old_buffers.of(name, self.buffer(name)) for name in compiled.program.updates},
            when=when,
            copies=self.copies,
            stops_early=self._compile is None,
        )

    def _selective(self, compiled: CompiledProgram, block: int) -> SelectiveBlock:
        """The code of a block with selective recomputation."""
        module, values = compiled.code_modules(outputs=False)[block], compiled.plan.blocks[block].recomputed
        wrap = self._compile or (lambda part: part)
        return compiled.once(("selective", self._compile, block), lambda: SelectiveBlock(module, values, wrap))

    def _prepared(
        self, batch: Mapping[str, Any] | Sequence[Any], kind: int, micro_batches: int, scaler: str = ""
    ) -> tuple[CompiledProgram, MicroBatches, bool]:
        """What runs a batch, its micro-batches on the device, and whether any rank's was padded. Collective."""
        self._old_buffers.clear()
        shapes = self._shapes
        self._num_steps += kind == STEP
        planned = shapes.base.micro_batch * micro_batches
        casts = self.plan.degrees.precision is not None
        change, optional = "", frozenset[str]()
        if self._origin is not None:
            change, optional = self._origin.change(self, trains=kind == STEP), self._origin.optional
        checked = read_batch(self.program, batch, planned, any_shape=shapes.can_capture, casts=casts, optional=optional)
        is_unsure = shapes.is_unsure(checked, micro_batches, self.training)
        counts, is_unsure = self._preflight.check(kind, self.training, self._step, checked, is_unsure, scaler, change)
        if kind == STEP and self._num_steps - 1 in COMPARED:
            self._compare_weights()
        sequences = self._sequences_to_run(counts, micro_batches, wants_outputs=kind == EVALUATION)

        def padded(ignored: Mapping[str, int]) -> Pieces:
            filled = pad_batch(checked, sequences, ignored, self._fillers)
            return split_micro_batches(checked.form, filled, micro_batches)

        pieces = padded(shapes.base.program.ignored or {})
        step = Wanted(batch=checked, pieces=pieces, padded=padded, training=self.training, is_unsure=is_unsure)
        compiled = shapes.compiled_for(step, self._preflight.exchange)
        is_padded = min(counts) < sequences
        if is_padded and compiled.program.ignored is None:
            raise batch_error(
                ["it is too short, and its model at this shape has no targets to ignore; pass a full batch"]
            )
        if micro_batches > 1 and compiled.program.mixes_batch is not None and not self.plan.degrees.per_micro_batch:
            raise PlanError(f"accumulate = {micro_batches} would change the loss: {compiled.program.mixes_batch}")
        if self._on_host is not None:
            self._on_host.send_values()
        if checked.sequences:
            self._fillers = first_rows(checked)
        if kind == STEP:
            samples = sum(counts) * self.plan.degrees.dp // self.plan.degrees.world_size
            tokens = samples * (compiled.program.sequence or 0)
            self.num_trained = (self.num_trained[0] + samples, self.num_trained[1] + tokens)
        return compiled, self._values_of(compiled, pieces), is_padded

    def _compare_weights(self) -> None:
        names, stage = list(self.program.every_parameter), self.rank_mesh.stage_rank
        self._preflight.same_weights(names, dict(self.stored_parameters()), stage)

    def generator(self, parameter: nn.Parameter) -> torch.Generator:
        """Give a generator of random numbers for this rank's part of a parameter or of its gradient.

        Ranks that hold the same elements get equal numbers, and other ranks independent ones. The numbers depend on the
        seed of the model and the number of steps, so a loaded checkpoint goes on with the same ones.

        Args:
            parameter: A parameter of this model.

        Returns:
            A new generator on the parameter's device.

        Raises:
            RuntimeInputError: The parameter is not one of this model's.

        Example:
            >>> parameter = next(parallel.parameters())
            >>> first, again = (torch.randn(3, generator=parallel.generator(parameter)) for _ in range(2))
            >>> bool((first == again).all())
            True
        """
        name = next((n for n, p in self.named_parameters() if p is parameter), None)
        if name is None:
            raise RuntimeInputError("parallel.generator takes a parameter of this model, from parallel.parameters()")
        where = [shards_of(part) for part in parts_of(parameter)]
        seed = seed_from(repr((self.streams.seed, self._step, name, where)))
        return torch.Generator(parameter.device).manual_seed(seed)

    def _refusal_of(self, counts: Sequence[int], micro_batches: int) -> str:
        """Why a step cannot run these numbers of sequences of the data-parallel ranks; empty if it can."""
        try:
            self._sequences_to_run(counts, micro_batches)
        except RuntimeInputError:
            of = f" of {micro_batches}" if micro_batches > 1 else ""
            return f"the model cannot ignore samples, nor do all ranks have the same multiple{of} of them"
        return ""

    def _sequences_to_run(self, counts: Sequence[int], micro_batches: int, *, wants_outputs: bool = False) -> int:
        return sequences_to_run(
            counts,
            self.base.micro_batch * micro_batches,
            micro_batches,
            pads=self.base.program.ignored is not None,
            captures=self._shapes.can_capture,
            wants_outputs=wants_outputs,
            per_micro_batch=self.plan.degrees.per_micro_batch,
        )

    def _values_of(self, compiled: CompiledProgram, pieces: Pieces) -> MicroBatches:
        """The inputs that this rank's stages read, on the device, and the denominators that they divide by."""
        program, stages = compiled.program, [compiled.stages[at] for at in self.stage_modules()]
        calls = [program.calls[i] for stage in stages for i in (*stage.calls, *stage.again)]
        divides = needs_denominator(program, stages)
        if divides:
            calls += [call for call in program.calls if call.phase == "denominator"]
        read = {a for call in calls for a in call.arguments if isinstance(a, str)}
        infos = [info for info in program.inputs if info.name in read]
        values = [{i.name: p[i.name].to(self.device, i.dtype) for i in infos} for p in pieces]
        if not divides:
            return values
        totals = compiled.denominators(values, per_micro_batch=self.plan.degrees.per_micro_batch)
        return [inputs | total for inputs, total in zip(values, totals, strict=True)]

    def _step_without_stages(
        self, compiled: CompiledProgram, micro_batches: MicroBatches, scale: torch.Tensor | None
    ) -> torch.Tensor:
        (module,) = self.stage_modules().values()
        loss, count = torch.zeros((), device=self.device), num_averaged(compiled.program, self.plan.degrees)
        for index, values in enumerate(micro_batches):
            self._before_backward(module, last=index == len(micro_batches) - 1)
            out = self._run_stage(compiled, module, values, index, count)[compiled.program.loss]
            (out if scale is None else out * scale).backward()
            loss = loss + out.detach()
        return loss

    def _before_backward(self, module: StageModule, *, last: bool) -> None:
        zero.before_backward(module, self.plan.degrees, last=last)
        if self._backward_step is not None:
            self._backward_step.is_last = last

    def _step_in_stages(
        self, compiled: CompiledProgram, micro_batches: MicroBatches, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Every run of the schedule; the loss is sent from the last stage to all."""
        pipeline, count = self.rank_mesh.pipeline, self.plan.degrees.micro_batches
        averaged = num_averaged(compiled.program, self.plan.degrees)
        assert pipeline is not None
        loss: torch.Tensor | None = None
        for first in range(0, len(micro_batches), count):

            def run(module: StageModule, received: dict[str, Any], index: int, at: int = first) -> Any:
                values = micro_batches[at + index] | received
                results = self._run_stage(compiled, module, values, at + index, averaged)
                if scale is not None and module.index == len(compiled.stages) - 1:
                    results[compiled.program.loss] = results[compiled.program.loss] * scale
                return results

            is_final = first + count == len(micro_batches)
            extra = self._pipeline(compiled, trains=True).step(run, is_final=is_final)
            loss = extra if loss is None else loss + extra
        assert loss is not None
        loss = loss if scale is None else loss / scale
        dist.all_reduce(loss, group=pipeline.group)
        return loss

    def _run_stage(
        self, compiled: CompiledProgram, module: StageModule, values: dict[str, Any], index: int, num_averaged: int
    ) -> dict[str, Any]:
        """One micro-batch through one stage in training; new values of buffers are kept."""
        self.streams.training = True
        functions = self._functions(compiled, False)
        execution = self._execution(compiled, functions, (self._step, index), outputs=False)
        results: dict[str, Any] = module(lambda: execution, values)
        program = compiled.program
        with torch.no_grad():
            for name, update in program.updates.items():
                if update in results:
                    self.buffer(name).copy_(results[update])  # it may be sent too
        if program.loss in results and module.index == len(compiled.stages) - 1:
            results[program.loss] = at_least_float32(results[program.loss]) / num_averaged
        return results

    def _pipeline(self, compiled: CompiledProgram, *, trains: bool) -> Pipeline:
        mesh, degrees = self.rank_mesh.pipeline, self.plan.degrees
        assert mesh is not None
        key = ("pipeline", trains)
        return compiled.once(key, lambda: Pipeline(compiled, self.stage_modules(), mesh, degrees, trains=trains))

    def _evaluated(
        self, batch: Mapping[str, Any] | Sequence[Any], functions: Functions, *, may_pad: bool = True
    ) -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
        """One micro-batch forward, with the given code of blocks: the program that ran, the loss and the outputs."""
        refuse_autocast(self.device.type)
        compiled, (values,), is_padded = self._prepared(batch, EVALUATION, 1)
        if is_padded and not may_pad:
            raise batch_error(["ranks hold different numbers of sequences; pass equally many on every rank"])
        program = compiled.program
        self._forget_copies()
        self.streams.training = not self.training  # what a model in eval mode still draws is meant
        run = self._execution(compiled, functions(compiled, True), (self._step, 0), outputs=True)
        scope: dict[str, Any] = {}
        if self.plan.degrees.pp == 1:
            (module,) = self.stage_modules().values()
            scope = module(lambda: run, values)
            loss = scope[program.loss]
        else:
            loss = self._evaluate_in_stages(compiled, run, values, scope)
        for module in self.stage_modules().values():
            zero.free_gathered(module)
        self._forget_copies()
        results = {"loss": loss}
        whole = self.rank_mesh.device_mesh.size() == 1
        for key, name in program.outputs.items() if not is_padded else ():
            if name in scope:
                dims, types = compiled.analysis.outer[name], compiled.types[name]
                results[key] = scope[name] if whole else as_dtensor(scope[name], dims, types, self.rank_mesh)
        return compiled, results

    def _evaluate_in_stages(
        self, compiled: CompiledProgram, execution: Execution, values: dict[str, Any], scope: dict[str, Any]
    ) -> torch.Tensor:
        """One micro-batch forward through all stages; what this rank's stages make joins `scope`."""

        def run(module: StageModule, received: dict[str, Any], index: int) -> Any:
            results = module(lambda: execution, values | received)
            names = {r for i in compiled.stages[module.index].calls for r in compiled.program.calls[i].results}
            scope.update({name: value for name, value in results.items() if name in names})
            return results

        pipeline, stages = self.rank_mesh.pipeline, self._pipeline(compiled, trains=False)
        assert pipeline is not None
        stages.evaluate(run)
        is_last = len(compiled.stages) - 1 in self.stage_modules()
        loss = at_least_float32(scope[compiled.program.loss].clone()) if is_last else stages.no_loss.clone()
        dist.all_reduce(loss, group=pipeline.group)
        return loss
