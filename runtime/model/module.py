"""`ParallelModel`: what the user holds and trains. Global names and shapes outside, shards and collectives inside."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx, nn

from autopar.errors import PlanError, RuntimeInputError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.stages import Stage, recomputed_calls
from autopar.runtime.codegen.randomness import Streams
from autopar.runtime.distributed.hang_report import Place, reports_position
from autopar.runtime.distributed.mesh import MeshDim, RankMesh
from autopar.runtime.model import zero
from autopar.runtime.model.compiled import CompiledProgram
from autopar.runtime.model.gradients import gradient_norm, local_gradient, sum_over
from autopar.runtime.model.inputs import (
    batch_error,
    first_rows,
    pad_batch,
    read_batch,
    sequences_to_run,
    split_micro_batches,
)
from autopar.runtime.model.outputs import as_dtensor
from autopar.runtime.model.pipeline import Pipeline, refuse_compiling
from autopar.runtime.model.preflight_check import EVALUATION, STEP, PreflightCheck
from autopar.runtime.model.shape_cache import Replan, ShapeCache
from autopar.runtime.model.sharded_model import ShardedModel
from autopar.runtime.model.stage import Execution, StageModule
from autopar.runtime.parameters.packed import complete_gradients
from autopar.runtime.profile.trace_step import trace_step

MicroBatches = list[dict[str, Any]]


class ParallelModel(ShardedModel):
    """A model split over the ranks of a mesh according to a `Plan`.

    `forward_backward(batch)` takes this rank's part of the global batch and leaves summed gradients; parameters are
    DTensors under the model's own names, an unequal packing in pieces (`named_parameters`). In a pipeline a rank holds
    those of its stages only, so names, state and gradients are of these. Every method is collective: all ranks call it
    in the same order.

    The mode set by `train()` and `eval()` is that of the model. For eval mode, and for shapes other than the plan's,
    `replan` captures the model again; without it only what the plan was made for runs.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        mesh: RankMesh,
        source: Callable[[str], torch.Tensor],
        device: torch.device,
        *,
        seed: int = 0,
        replan: Replan | None = None,
        buffers: Callable[[str], torch.Tensor] | None = None,
    ) -> None:
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
        """Generated code per distinct block: the training program, or the one that keeps all outputs."""
        return self._shapes.base.code_modules(outputs=outputs)

    def compile(self, **options: Any) -> None:
        """Run the generated blocks through `torch.compile`, whose options these are, from the next step on.

        A distinct block is compiled once for all its calls, collectives included. Raises `RuntimeInputError` under a
        pipeline schedule that splits the backward pass, which compiled code cannot.
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
        """Refused: a step is `forward_backward(batch)`, an evaluation `evaluate(batch)`."""
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
            raise batch_error(["it is too short to run, and captured anew its samples cannot be ignored"])
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
        program, stages = compiled.program, self.stages_in(compiled)
        calls = (program.calls[i] for s in self.stage_modules() for i in stages[s].calls)
        return program.denominator is not None and any(program.denominator in call.arguments for call in calls)

    @reports_position
    def forward_backward(self, batch: Mapping[str, Any] | Sequence[Any]) -> torch.Tensor:
        """One step's loss and gradients; returns the loss of the global batch, equal on every rank: where the plan says
        `per_micro_batch`, the mean of the losses of its micro-batches.

        `batch` is this rank's part of the global batch: `micro_batch × micro_batches × accumulate` sequences. Ranks
        that differ only in `tp` or `pp` pass the same data. With fewer sequences, on some ranks or all, the batch is
        padded where samples can be ignored. Another sequence length, or another number of sequences on all ranks,
        captures the model again, once for each shape.

        Before anything is sent one all-gather of 8 × (4 + 2 × inputs) bytes a rank, on the host, compares step,
        shapes and data of the ranks. Raises `RuntimeInputError` on all ranks where those do not agree, or where a
        batch has a wrong name, shape or dtype.
        """
        degrees = self.plan.degrees
        compiled, micro_batches, _ = self._prepared(batch, STEP, degrees.num_micro_batches)
        program = compiled.program
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
        for parameter, grad in earlier:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        complete_gradients(program, dict(self.named_parameters()))
        self._step += 1
        return loss

    def _share(self, compiled: CompiledProgram) -> int:
        """What the loss of one micro-batch is divided by besides its denominator."""
        averages = compiled.program.loss_reduction == "mean" or self.plan.degrees.per_micro_batch
        return self.plan.degrees.num_micro_batches if averages else 1

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
            found[program.loss] = found[program.loss] / self._share(compiled)
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
        """What the loss of each micro-batch is divided by, by name: the sum over all of them, or its own."""
        name = compiled.program.denominator
        if name is None or not self._needs_denominator(compiled):
            return [{} for _ in micro_batches]
        own = [compiled.denominator(values) for values in micro_batches]
        if not self.plan.degrees.per_micro_batch:
            own = [torch.stack(own).sum(0)] * len(own)
        return [{name: one} for one in own]

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """This rank's batches, as long as every rank has one: one all-gather of a few integers for each. Collective.

        Raises `RuntimeInputError` on all ranks, naming them, where some run out of data before the others.
        """
        return self._preflight.in_lockstep(loader)

    def _deferred(self) -> Iterator[tuple[MeshDim, list[nn.Parameter]]]:
        """Per mesh dimension, the parameters whose gradient sum is deferred to once a step."""
        for name, dim in self.rank_mesh.dims.items():
            by_zero = name == "dp" and self.plan.degrees.zero > 0
            if dim.degree > 1:
                own = [p for n, p in self.named_parameters() if name in self.placements[n].deferred]
                yield dim, [p for p in own if not (by_zero and zero.is_zero_sharded(p))]

    def _set_aside(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients of earlier calls are summed already; keep them out of what this call sums at its end."""
        late = [p for _, parameters in self._deferred() for p in parameters]
        named = dict(self.named_parameters())
        late += [named[name] for name in self.ties.names if name in named]
        found = {p: p.grad for p in late if p.grad is not None}
        for parameter in found:
            parameter.grad = None
        return list(found.items())

    def _sum_deferred(self) -> None:
        for dim, parameters in self._deferred():
            sum_over([g for p in parameters if (g := local_gradient(p)) is not None], dim.group)

    @reports_position
    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Any] | Sequence[Any]) -> dict[str, torch.Tensor]:
        """Loss and outputs of one micro-batch without gradients; outputs are DTensors with global shapes.

        In a pipeline every rank has the loss, and the outputs that its own stages make. After `eval()` this is what
        the unmodified model computes in eval mode, captured when first asked for; in training mode it is the training
        program without dropout. Where ranks hold different numbers of sequences the batch is padded, and only the loss
        is returned.
        """
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

    @reports_position
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their global 2-norm is at most `max_norm`; returns the norm before."""
        named = {name: p for name, p in self.named_parameters() if p.grad is not None}
        parameters = list(named.values())
        norm = gradient_norm(named, self.ties.num_ranks, self.rank_mesh.device_mesh.size(), self.device)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            grad = local_gradient(parameter)
            assert grad is not None
            grad.mul_(scale.to(grad.dtype))
        return norm

    # Reading.

    def trace(self, path: str | os.PathLike[str], batch: Mapping[str, Any] | Sequence[Any]) -> None:
        """Write one profiled `forward_backward(batch)` of all ranks, after two others, as a Chrome trace.

        A process for each rank; tracks for its compute, the collectives of each mesh dimension and the messages between
        stages (docs/trace.md). Rank 0 writes the file, whole or not at all. Weights, gradients, buffers and the step
        count stay as they were; meanwhile there is memory for gradients twice.

        Raises `InputError` on all ranks where the file cannot be written, and what `forward_backward` raises.
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
        """Generated code of a block, by index, block name or module path."""
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


def readable(code: str) -> str:
    """Generated code without module prefixes and without the deletions that free memory early."""
    code = re.sub(r";  (\w+ = )+None(?=\n|$)", "", code)
    return re.sub(r"autopar_lowering_(?:functions|gather_linear|vocabulary|randomness)_", "", code).strip()
