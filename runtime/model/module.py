"""`ParallelModel`, the model that a user trains: global names and shapes outside, shards and collectives inside."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx

from autopar.errors import PlanError, RuntimeInputError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.stages import Stage, needs_denominator, num_averaged, recomputed_calls
from autopar.runtime.codegen.randomness import Streams
from autopar.runtime.distributed.hang_report import Place, reports_position
from autopar.runtime.distributed.mesh import training_mesh
from autopar.runtime.model import zero
from autopar.runtime.model.compiled import CompiledProgram, readable
from autopar.runtime.model.inputs import (
    batch_error,
    first_rows,
    pad_batch,
    read_batch,
    sequences_to_run,
    split_micro_batches,
)
from autopar.runtime.model.outputs import as_dtensor, refuse_autocast, step_loss
from autopar.runtime.model.pipeline import Pipeline, refuse_compiling
from autopar.runtime.model.preflight_check import EVALUATION, STEP, PreflightCheck
from autopar.runtime.model.shape_cache import Replan, ShapeCache
from autopar.runtime.model.sharded_model import ShardedModel
from autopar.runtime.model.stage import Execution, StageModule
from autopar.runtime.profile.trace_step import trace_step

MicroBatches = list[dict[str, Any]]


class ParallelModel(ShardedModel):
    """A model split over the ranks of a job according to a `Plan`; `autopar.parallelize` makes it.

    Parameters are DTensors under the model's own names. A pipeline rank holds the parameters of its own stages only,
    so names, state and gradients are those of its stages. Every method is collective: all ranks call the same methods
    in the same order.

    `train()` and `eval()` set the mode of the model. A new input shape, and eval mode, capture the model again.

    Args:
        program: The captured training program.
        plan: The plan of this program.
        source: A function from a parameter's name to its whole tensor. It is not kept.
        device: This rank's device.
        seed: The seed of dropout and other random operators.
        replan: A function that captures the model for another shape or mode. Without it only the plan's shapes run.
        buffers: A function from a buffer's name to its whole tensor; `source` by default.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
        >>> batch = (torch.randn(4, 8), torch.arange(4))
        >>> loss_fn = torch.nn.functional.cross_entropy
        >>> parallel = autopar.parallelize(model, "1xcpu", example_inputs=batch, plan={"dp": 1}, loss_fn=loss_fn)
        >>> optimizer = torch.optim.AdamW(parallel.parameters())
        >>> loss = parallel.forward_backward(batch)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

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
    ) -> None:
        mesh = training_mesh(plan.degrees, device.type)
        super().__init__(program, plan, mesh, source, device, Streams(mesh.dims, seed, device), buffers or source)
        self._compile_options: dict[str, Any] | None = None
        self._compiled_code = WeakKeyDictionary[CompiledProgram, dict[bool, list[Callable[..., Any]]]]()
        self._step = 0
        self._fillers: dict[str, torch.Tensor] = {}
        self._preflight = PreflightCheck(mesh, program.inputs)
        self.place = Place(degrees=plan.degrees, pipeline=mesh.pipeline)
        self._shapes = ShapeCache(self.base, self.placements, replan)
        self._pipelines = WeakKeyDictionary[CompiledProgram, dict[bool, Pipeline]]()

    # Running.

    def code_modules(self, *, outputs: bool) -> list[fx.GraphModule]:
        """Give the generated code of every distinct block, as modules.

        Args:
            outputs: Whether the code keeps all outputs of the model, as `evaluate` does. The code of a training step
                computes the loss only.

        Returns:
            One module for each distinct block of the plan, in the plan's order.

        Example:
            >>> len(parallel.code_modules(outputs=False)) == len(parallel.plan.blocks)
            True
        """
        return self._shapes.base.code_modules(outputs=outputs)

    def compile(self, **options: Any) -> None:
        """Run the generated blocks through `torch.compile` from the next step on.

        A distinct block is compiled once for all its calls, with its collectives.

        Args:
            options: The options of `torch.compile`, such as ``backend="inductor"``.

        Raises:
            RuntimeInputError: The plan's pipeline schedule splits the backward pass, which compiled code cannot do.

        Example:
            >>> parallel.compile(backend="eager")
        """
        refuse_compiling(self.plan.degrees)
        self._compile_options = options
        self._compiled_code.clear()

    def _functions(self, compiled: CompiledProgram, outputs: bool) -> Sequence[Callable[..., Any]]:
        """What runs the distinct blocks: generated code, or what `torch.compile` made of it."""
        modules = compiled.code_modules(outputs=outputs)
        if self._compile_options is None:
            return modules
        made = self._compiled_code.setdefault(compiled, {})
        if outputs not in made:
            made[outputs] = [torch.compile(module, **self._compile_options) for module in modules]
        return made[outputs]

    def forward(self, *_: Any) -> None:
        """Refuse to run: a training step is `forward_backward(batch)`, an evaluation `evaluate(batch)`.

        Args:
            _: Anything.

        Raises:
            RuntimeInputError: Always.

        Example:
            >>> parallel(batch)
            Traceback (most recent call last):
            autopar.errors.RuntimeInputError: a ParallelModel runs forward and backward together; ...
        """
        raise RuntimeInputError(
            "a ParallelModel runs forward and backward together; call forward_backward(batch), or evaluate(batch)"
        )

    def _execution(self, compiled: CompiledProgram, when: tuple[int, int], *, outputs: bool) -> Execution:
        return Execution(
            compiled=compiled,
            functions=self._functions(compiled, outputs),
            partly=compiled.partial_module,
            outputs=outputs,
            state={name: self.buffer(name) for name in compiled.program.updates},
            streams=self.streams,
            when=when,
            recomputed=frozenset() if outputs else self._recomputed(compiled),
        )

    def _recomputed(self, compiled: CompiledProgram) -> frozenset[int]:
        return recomputed_calls(compiled.program, self.plan.degrees, self.stages_in(compiled))

    def _prepared(
        self, batch: Mapping[str, Any] | Sequence[Any], kind: int, micro_batches: int
    ) -> tuple[CompiledProgram, MicroBatches, bool]:
        """What runs a batch, its micro-batches on the device, and whether any rank's was padded. Collective."""
        shapes, evaluates = self._shapes, kind == EVALUATION
        planned = shapes.base.micro_batch * micro_batches
        own = read_batch(self.program, batch, planned, any_shape=shapes.can_capture)
        counts = self._preflight.check(kind, self.training, self._step, own)
        sequences = sequences_to_run(
            counts,
            planned,
            micro_batches,
            pads=shapes.base.ignored is not None,
            captures=shapes.can_capture,
            wants_outputs=evaluates,
            per_micro_batch=self.plan.degrees.per_micro_batch,
        )
        filled = pad_batch(self.program, own, sequences, shapes.base.ignored or {}, self._fillers)
        if own.sequences:
            self._fillers = first_rows(self.program, own)
        pieces = split_micro_batches(self.program, filled, micro_batches)
        compiled = shapes.compiled_for({n: tuple(t.shape) for n, t in pieces[0].items()}, self.training)
        is_padded = min(counts) < sequences
        if is_padded and compiled.ignored is None:
            raise batch_error(
                ["it is too short, and its model at this shape has no targets to ignore; pass a full batch"]
            )
        if micro_batches > 1 and compiled.program.mixes_batch is not None and not self.plan.degrees.per_micro_batch:
            raise PlanError(f"accumulate = {micro_batches} would change the loss: {compiled.program.mixes_batch}")
        read = self._inputs_read(compiled)
        return compiled, [{n: t.to(self.device) for n, t in piece.items() if n in read} for piece in pieces], is_padded

    def _inputs_read(self, compiled: CompiledProgram) -> set[str]:
        """The inputs that this rank's stages read, for the loss's denominator too."""
        program, stages = compiled.program, self.stages_in(compiled)
        own = [program.calls[i] for s in self.stage_modules() for i in (*stages[s].calls, *stages[s].again)]
        if self._needs_denominator(compiled):
            own += [call for call in program.calls if call.phase == "denominator"]
        return {a for call in own for a in call.arguments if isinstance(a, str)}

    def _needs_denominator(self, compiled: CompiledProgram) -> bool:
        """Whether this rank's stages divide by the loss's denominator."""
        stages = self.stages_in(compiled)
        return needs_denominator(compiled.program, (stages[index] for index in self.stage_modules()))

    @reports_position
    def forward_backward(self, batch: Mapping[str, Any] | Sequence[Any]) -> torch.Tensor:
        """Compute the loss and gradients of one training step.

        Gradients are added to `.grad`, already summed over ranks. With fewer sequences than planned the batch is
        padded, if the model can ignore samples. Another sequence length, or another number of sequences on all ranks,
        captures the model again, once for each shape.

        Before anything else is sent, the ranks compare step, shapes and data. This is one all-gather on the host of
        8 × (4 + 2 × inputs) bytes a rank.

        Args:
            batch: This rank's part of the global batch, ``micro_batch × micro_batches × accumulate`` sequences: a dict
                of tensors by name, or a tuple. Ranks that differ only in ``tp`` or ``pp`` pass the same data.

        Returns:
            The loss of the global batch, a scalar that is equal on every rank. If the plan says `per_micro_batch`, it
            is the mean of the micro-batches' losses.

        Raises:
            RuntimeInputError: A batch has a wrong name, shape or dtype, or the ranks disagree. All ranks raise it.
                Autocast is on.

        Example:
            >>> loss = parallel.forward_backward(batch)
            >>> loss.shape
            torch.Size([])
        """
        refuse_autocast(self.device.type)
        degrees = self.plan.degrees
        compiled, micro_batches, _ = self._prepared(batch, STEP, degrees.num_micro_batches)
        compiled.code_modules(outputs=False)
        denominators = self._denominators(compiled, micro_batches)
        values = [own | more for own, more in zip(micro_batches, denominators, strict=True)]
        earlier = self._set_aside()
        self.ties.copy_to_twins(self.stage_modules())
        if degrees.pp == 1:
            loss = self._step_without_stages(compiled, values)
        else:
            loss = self._step_in_stages(compiled, values)
        with torch.no_grad():
            self.ties.sum_gradients(self.stage_modules())
            self._sum_deferred()
            self._show_gradients(earlier)
        self._step += 1
        return step_loss(loss)

    def _step_without_stages(self, compiled: CompiledProgram, micro_batches: MicroBatches) -> torch.Tensor:
        (stage,), (module,) = self.stages_in(compiled), self.stage_modules().values()
        loss = torch.zeros((), device=self.device)
        for index, values in enumerate(micro_batches):
            zero.before_backward(module, self.plan.degrees, last=index == len(micro_batches) - 1)
            out = self._run_stage(compiled, module, stage, values, index)[compiled.program.loss]
            out.backward()
            loss = loss + out.detach()
        return loss

    def _step_in_stages(self, compiled: CompiledProgram, micro_batches: MicroBatches) -> torch.Tensor:
        """Every run of the schedule; the loss is sent from the last stage to all."""
        pipeline, count = self.rank_mesh.pipeline, self.plan.degrees.micro_batches
        assert pipeline is not None
        loss: torch.Tensor | None = None
        for first in range(0, len(micro_batches), count):

            def run(module: StageModule, stage: Stage, received: dict[str, Any], index: int, at: int = first) -> Any:
                values = micro_batches[at + index] | received
                return self._run_stage(compiled, module, stage, values, at + index)

            is_final = first + count == len(micro_batches)
            found = self._pipeline(compiled, trains=True).step(run, is_final=is_final)
            loss = found if loss is None else loss + found
        assert loss is not None
        dist.all_reduce(loss, group=pipeline.group)
        return loss

    def _run_stage(
        self, compiled: CompiledProgram, module: StageModule, stage: Stage, values: dict[str, Any], index: int
    ) -> dict[str, Any]:
        """One micro-batch through one stage in training; new values of buffers are kept."""
        self.streams.training = True
        execution = self._execution(compiled, (self._step, index), outputs=False)
        found: dict[str, Any] = module(lambda: (execution, stage), values)
        program = compiled.program
        with torch.no_grad():
            for name, update in program.updates.items():
                if update in found:
                    self.buffer(name).copy_(found.pop(update))
        if program.loss in found and stage.index == len(self.stages_in(compiled)) - 1:
            found[program.loss] = found[program.loss] / num_averaged(program, self.plan.degrees)
        return found

    def _pipeline(self, compiled: CompiledProgram, *, trains: bool) -> Pipeline:
        made, mesh = self._pipelines.setdefault(compiled, {}), self.rank_mesh.pipeline
        assert mesh is not None
        if trains not in made:
            degrees = self.plan.degrees
            made[trains] = Pipeline(
                compiled, self.stages_in(compiled), self.stage_modules(), mesh, degrees, trains=trains
            )
        return made[trains]

    @torch.no_grad()
    def _denominators(self, compiled: CompiledProgram, micro_batches: MicroBatches) -> list[dict[str, torch.Tensor]]:
        """The denominator of each micro-batch's loss, by name: the sum over micro-batches, or its own."""
        name = compiled.program.denominator
        if name is None or not self._needs_denominator(compiled):
            return [{} for _ in micro_batches]
        own = [compiled.denominator(values) for values in micro_batches]
        if not self.plan.degrees.per_micro_batch:
            own = [torch.stack(own).sum(0)] * len(own)
        return [{name: one} for one in own]

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over this rank's batches until all ranks run out of data together.

        Each batch takes one all-gather of a few integers.

        Args:
            loader: An iterable of batches, such as a `DataLoader`.

        Yields:
            The items of `loader`.

        Raises:
            RuntimeInputError: Some ranks run out of data before others. The message names them; all ranks raise it.

        Example:
            >>> losses = [parallel.forward_backward(item) for item in parallel.batches([batch, batch])]
            >>> len(losses)
            2
        """
        return self._preflight.in_lockstep(loader)

    @reports_position
    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Any] | Sequence[Any]) -> dict[str, torch.Tensor]:
        """Compute the loss and outputs of one micro-batch without gradients.

        After `eval()` the result is that of the unmodified model in eval mode, which is captured at the first call. In
        training mode the training program runs without dropout.

        Args:
            batch: This rank's sequences: a dict of tensors by name, or a tuple. If ranks hold different numbers of
                sequences, the batch is padded and only the loss is returned.

        Returns:
            The loss under ``"loss"``, and the model's outputs by name as DTensors with global shapes. In a pipeline
            every rank has the loss, and the outputs of its own stages.

        Raises:
            RuntimeInputError: A batch has a wrong name, shape or dtype, or the ranks disagree. All ranks raise it.
            PlanError: The captured model cannot run as the plan says.

        Example:
            >>> result = parallel.eval().evaluate(batch)
            >>> tuple(result["loss"].shape)
            ()
            >>> parallel = parallel.train()
        """
        refuse_autocast(self.device.type)
        compiled, (values,), is_padded = self._prepared(batch, EVALUATION, 1)
        program = compiled.program
        if program.denominator is not None and self._needs_denominator(compiled):
            values[program.denominator] = compiled.denominator(values)
        compiled.code_modules(outputs=True)
        self.streams.training = not self.training  # what a model in eval mode still draws is meant
        run = self._execution(compiled, (self._step, 0), outputs=True)
        scope: dict[str, Any] = {}
        if self.plan.degrees.pp == 1:
            (stage,), (module,) = self.stages_in(compiled), self.stage_modules().values()
            scope = module(lambda: (run, stage), values)
            loss = scope[program.loss]
        else:
            loss = self._evaluate_in_stages(compiled, run, values, scope)
        for module in self.stage_modules().values():
            zero.free_gathered(module)
        found = {"loss": loss}
        whole = self.rank_mesh.device_mesh.size() == 1
        for key, name in program.outputs.items() if not is_padded else ():
            if name in scope:
                dims, types = compiled.analysis.outer[name], compiled.types[name]
                found[key] = scope[name] if whole else as_dtensor(scope[name], dims, types, self.rank_mesh)
        return found

    def _evaluate_in_stages(
        self, compiled: CompiledProgram, execution: Execution, values: dict[str, Any], scope: dict[str, Any]
    ) -> torch.Tensor:
        """One micro-batch forward through all stages; what this rank's stages make joins `scope`."""

        def run(module: StageModule, stage: Stage, received: dict[str, Any], index: int) -> Any:
            found = module(lambda: (execution, stage), values | received)
            made = {r for i in stage.calls for r in compiled.program.calls[i].results}
            scope.update({name: value for name, value in found.items() if name in made})
            return found

        pipeline, stages = self.rank_mesh.pipeline, self._pipeline(compiled, trains=False)
        assert pipeline is not None
        stages.evaluate(run)
        is_last = len(self.stages_in(compiled)) - 1 in self.stage_modules()
        loss = scope[compiled.program.loss].clone() if is_last else stages.no_loss.clone()
        dist.all_reduce(loss, group=pipeline.group)
        return loss

    # Reading.

    def trace(self, path: str | os.PathLike[str], batch: Mapping[str, Any] | Sequence[Any]) -> None:
        """Profile one training step on all ranks, and write it as a Chrome trace (docs/trace.md).

        Two steps run before the profiled one. Weights, gradients, buffers and the step count stay unchanged. Gradients
        take twice their memory meanwhile. Rank 0 writes the file, whole or not at all.

        Args:
            path: The JSON file to write, for ui.perfetto.dev or chrome://tracing. Every rank is a process, with tracks
                for its compute, the collectives of each mesh dimension and the messages between stages.
            batch: This rank's part of the global batch, as for `forward_backward`.

        Raises:
            InputError: The file cannot be written. All ranks raise it.
            RuntimeInputError: As `forward_backward`.

        Example:
            >>> parallel.trace("step.json", batch)
        """
        step, grads = self._step, [(p, p.grad) for p in self.parameters()]
        buffers = [(held, held.clone()) for held in map(self.buffer, self.program.updates)]

        def one_step() -> None:
            self.zero_grad()
            self.forward_backward(batch)

        try:
            sizes = {
                "sequence": self.program.sequence,
                "parameters": sum(info.num_elements for info in self.program.parameters.values()),
            }
            trace_step(path, one_step, self.rank_mesh, self.plan.degrees, self.device, sizes=sizes)
        finally:
            self._step = step
            for parameter, grad in grads:
                parameter.grad = grad
            for held, before in buffers:
                held.copy_(before)

    def code(self, block: int | str) -> str:
        """Give the generated code of a block, as readable Python.

        Args:
            block: The index of a distinct block, its name, or the module path of one of its calls.

        Returns:
            The code of its forward pass, with every collective.

        Raises:
            RuntimeInputError: The model has no such block. The message lists the names.

        Example:
            >>> print(parallel.code(0).splitlines()[0][:4])
            def
        """
        index = block if isinstance(block, int) else self._block_index(block)
        return readable(self.code_modules(outputs=False)[index].code)

    def _block_index(self, name: str) -> int:
        for call in self.program.calls:
            if name in (call.path, self.program.blocks[call.block].name):
                return call.block
        names = sorted({b.name for b in self.program.blocks})
        raise RuntimeInputError(f"no block {name!r}; the distinct blocks are {names}")

    def __repr__(self) -> str:
        degrees = self.plan.degrees
        stages = f"pp={degrees.pp}, " if degrees.pp > 1 else ""
        lines = [f"ParallelModel({stages}tp={degrees.tp}, dp={degrees.dp}, zero={degrees.zero})"]
        for i, block in enumerate(self.program.blocks):
            uses = len(self.program.uses_of_block(i))
            lines.append(f"\n# block {i}: {block.name}, called {uses} time{'s' * (uses > 1)}\n{self.code(i)}")
        return "\n".join(lines)
