"""`ParallelModel`: what the user holds and trains. Global names and shapes outside, shards and collectives inside."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError, RuntimeInputError
from autopar.ir.plan import Plan
from autopar.ir.program import CallSite, Program
from autopar.runtime import zero
from autopar.runtime.agreement import EVALUATION, STEP, Agreement
from autopar.runtime.compiled import Compiled, compile_program
from autopar.runtime.execute import run_calls
from autopar.runtime.gradients import gradient_norm, local_gradient, sum_over
from autopar.runtime.holding import converted, held_whole
from autopar.runtime.inputs import first_rows, padded, read_batch, sequences_to_run, split_micro_batches, unfit
from autopar.runtime.mesh import MeshDim, RankMesh
from autopar.runtime.outputs import as_dtensor
from autopar.runtime.parameters import Held, held, local_value, make_parameter, zero_dim
from autopar.runtime.pieces import by_whole, complete_gradients, joined, with_pieces
from autopar.runtime.randomness import Streams
from autopar.runtime.shapes import Replan, Shapes
from autopar.runtime.state import optimizer_state, whole_state

MicroBatches = list[dict[str, Any]]


class Segment(nn.Module):
    """The parameters of one call of a block in training, gathered while code that needs them runs."""

    def __init__(self, names: Mapping[str, Held]) -> None:
        super().__init__()
        self.names = dict(names)

    def forward(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """`run` of this segment's parameters by name, and of the arguments."""
        own = {name: local_value(getattr(self, attribute(name)), how) for name, how in self.names.items()}
        return run(own, *arguments)


def attribute(name: str) -> str:
    """A parameter's name as an attribute of the module that holds it."""
    return name.replace(".", "__")


class ParallelModel(nn.Module):
    """A model split over the ranks of a mesh according to a `Plan`.

    `forward_backward(batch)` takes this rank's part of the global batch and leaves summed gradients; parameters are
    DTensors under the model's own names, an unequal packing in pieces (`named_parameters`). Every method is collective:
    all ranks call it in the same order.

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
    ) -> None:
        super().__init__()
        self.program, self.plan, self.rank_mesh, self.device = program, plan, mesh, device
        self._compile_options: dict[str, Any] | None = None
        self._compiled_code = WeakKeyDictionary[Compiled, dict[bool, list[Callable[..., Any]]]]()
        self._streams = Streams(mesh.dims, seed, device)
        self._step = 0
        self._fillers: dict[str, torch.Tensor] = {}
        self._agreement = Agreement(mesh, program.inputs)
        self._hold_buffers(source)
        base = compile_program(program, plan, self._buffer, mesh, self._streams, device)
        self.analysis, self.types = base.analysis, base.types
        self._held = {
            name: held(name, self.analysis.outer[name], self.types[name], plan.mesh) for name in program.parameters
        } | {name: held_whole(info, plan.mesh) for name, info in program.unused.items()}
        self._shapes = Shapes(base, self._held, replan)
        source = with_pieces(program, source)
        owners = _owners(program)
        self._zero_dims: dict[nn.Parameter, int | None] = {}
        self.segments = nn.ModuleList()
        for index, call in enumerate(program.calls):
            own = {n: self._held[n] for n in call.arguments if isinstance(n, str) and owners.get(n) == index}
            segment = Segment(own)
            self._fill(segment, own, source)
            zero.shard(segment, self._zero_dims, plan.degrees, mesh)
            self.segments.append(segment)
        shared = [n for n, owner in owners.items() if owner is None]
        self._shared = {n: self._held[n] for n in (*shared, *program.unused)}
        self._segment_of = {n: owner for n, owner in owners.items() if owner is not None}
        self._fill(self, self._shared, source)
        zero.shard(self, self._zero_dims, plan.degrees, mesh, root=True)
        self._zero_dims.clear()  # FSDP2 has replaced the parameters

    def _fill(self, module: nn.Module, names: Mapping[str, Held], source: Callable[[str], torch.Tensor]) -> None:
        mesh = self.rank_mesh
        at = [mesh.dims[n].coordinate for n in self.plan.mesh.names]
        for name, how in names.items():
            info = self.program.every_parameter[name]
            whole = source(name).to(info.dtype)
            made = make_parameter(
                how, whole, self.plan.mesh, at, mesh.tensor_mesh, self.device, requires_grad=info.requires_grad
            )
            used = name in self.program.parameters
            self._zero_dims[made] = zero_dim(how, self.plan.degrees.dp_shard) if used else None
            module.register_parameter(attribute(name), made)

    def _hold_buffers(self, source: Callable[[str], torch.Tensor]) -> None:
        """Every buffer that a state dict holds or that forward changes, whole; others when they are asked for."""
        self._buffer_source = source
        for name, info in self.program.buffers.items():
            if info.persistent or not {name, *info.aliases}.isdisjoint(self.program.updates):
                self._buffer(name)

    def _buffer(self, name: str) -> torch.Tensor:
        """A buffer that is held, by any of its names."""
        first, info = next((n, i) for n, i in self.program.buffers.items() if name in (n, *i.aliases))
        if attribute(first) not in self._buffers:
            value = self._buffer_source(first).to(info.dtype).to(self.device, copy=True)
            self.register_buffer(attribute(first), value, persistent=info.persistent)
        found: torch.Tensor = getattr(self, attribute(first))
        return found

    # Names: the model's own, whatever the layout.

    def _owner_of(self) -> dict[str, nn.Module]:
        owners: dict[str, nn.Module] = dict.fromkeys(self._shared, self)
        for segment in self.segments:
            assert isinstance(segment, Segment)
            owners.update(dict.fromkeys(segment.names, segment))
        return owners

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the model's names, unused ones last; a tied parameter once, or under all its names.

        An unequal packing, such as queries, keys and values of different sizes in one projection, is held in pieces
        named after their rows: ``qkv_proj.weight[0:3072]``. `state_dict` joins them.
        """
        if not recurse:  # what torch asks of one module of the tree
            yield from super().named_parameters(prefix, False, remove_duplicate)
            return
        owners = self._owner_of()
        start = prefix + ("." if prefix else "")
        for name, info in self.program.every_parameter.items():
            parameter: nn.Parameter = getattr(owners[name], attribute(name))
            for alias in (name, *(() if remove_duplicate else info.aliases)):
                yield start + alias, parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's names and shapes, sharded values; torch.distributed.checkpoint saves and loads it in place."""
        parameters = dict(self.named_parameters())
        found: dict[str, Any] = {}
        for name, infos in by_whole(self.program):
            state = whole_state(infos, [parameters[info.name].detach() for info in infos], self._held)
            found |= dict.fromkeys((name, *infos[0].aliases), state)
        for first, info in self.program.buffers.items():
            if info.persistent:
                found |= dict.fromkeys((first, *info.aliases), self._buffer(first))
        return found

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter name, flat and sharded as `state_dict`; values load in place."""
        return optimizer_state(self.program, dict(self.named_parameters()), optimizer, self._held)

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """Every gradient whole under the model's names, on every rank. Collective; for verification."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                found[name] = whole.reshape(self._held[name].dims.shape).clone()
        return joined(self.program, found)

    # Running.

    def code_modules(self, *, outputs: bool) -> list[fx.GraphModule]:
        """Generated code per distinct block: the training program, or the one that keeps all outputs."""
        return self._shapes.base.code_modules(outputs=outputs)

    def compile(self, **options: Any) -> None:
        """Run the generated blocks through `torch.compile`, whose options these are, from the next step on.

        A distinct block is compiled once for all its calls, collectives included.
        """
        self._compile_options = options
        self._compiled_code.clear()

    def _functions(self, compiled: Compiled, outputs: bool) -> Sequence[Callable[..., Any]]:
        """What runs the distinct blocks: generated code, or what `torch.compile` made of it."""
        modules = compiled.code_modules(outputs=outputs)
        if self._compile_options is None:
            return modules
        made = self._compiled_code.setdefault(compiled, {})
        if outputs not in made:
            made[outputs] = [torch.compile(module, **self._compile_options) for module in modules]
        return made[outputs]

    def forward(self, compiled: Compiled, values: dict[str, Any], outputs: bool, when: tuple[int, int]) -> Any:
        """Run the main calls over named local values; used by `forward_backward` and `evaluate`."""
        program = compiled.program
        functions = self._functions(compiled, outputs)
        shared = {
            n: self._taken(compiled, n, local_value(getattr(self, attribute(n)), how))
            for n, how in self._shared.items()
            if n in program.parameters
        }
        placeholders: dict[str, Any] = {**dict.fromkeys(program.parameters), **shared}
        state = {name: self._buffer(name) for name in program.updates}
        scope = {**placeholders, **compiled.constants(), **state, **values}
        calls = [(i, c) for i, c in enumerate(program.calls) if c.phase == "main"]
        training = self._streams.training

        def function_of(k: int, call: CallSite) -> Callable[..., Any]:
            index = calls[k][0]

            def run(own: Mapping[str, torch.Tensor], *arguments: Any) -> Any:
                pairs = zip(call.arguments, arguments, strict=True)
                self._streams.begin(*when, index, training=training)
                filled = [self._taken(compiled, a, own[a]) if isinstance(a, str) and a in own else v for a, v in pairs]
                return functions[call.block](*filled)

            for segment in self._segments_of(call):
                run = _within(segment, run)
            return lambda *arguments: run({}, *arguments)

        run_calls([c for _, c in calls], function_of, scope, compiled.results_of(outputs=outputs))
        wanted = {program.loss, *(program.outputs if outputs else program.updates).values()}
        return {name: scope[name] for name in wanted}

    def _taken(self, compiled: Compiled, name: str, value: torch.Tensor) -> torch.Tensor:
        """A parameter as a program takes it."""
        if name not in compiled.used:
            return value
        return converted(value, self._held[name], compiled.used[name], self.rank_mesh)

    def _segments_of(self, call: CallSite) -> list[nn.Module]:
        """The segments that hold a call's parameters: one in the training step, perhaps several in another capture."""
        found = {self._segment_of[a]: None for a in call.arguments if isinstance(a, str) and a in self._segment_of}
        return [self.segments[index] for index in found]

    def _prepared(
        self, batch: Mapping[str, Any] | Sequence[Any], kind: int, micro_batches: int
    ) -> tuple[Compiled, MicroBatches, bool]:
        """What runs a batch, its micro-batches on the device, and whether any rank's was padded. Collective."""
        shapes, evaluates = self._shapes, kind == EVALUATION
        planned = shapes.base.micro_batch * micro_batches
        own = read_batch(self.program, batch, planned, any_shape=shapes.can_capture)
        counts = self._agreement.check(kind, self.training, self._step, own)
        sequences = sequences_to_run(
            counts,
            planned,
            micro_batches,
            pads=shapes.base.ignored is not None,
            captures=shapes.can_capture,
            wants_outputs=evaluates,
            per_micro_batch=self.plan.degrees.per_micro_batch,
        )
        filled = padded(self.program, own, sequences, shapes.base.ignored or {}, self._fillers)
        if own.sequences:
            self._fillers = first_rows(self.program, own)
        pieces = split_micro_batches(self.program, filled, micro_batches)
        compiled = shapes.compiled_for({n: tuple(t.shape) for n, t in pieces[0].items()}, self.training)
        is_padded = min(counts) < sequences
        if is_padded and compiled.ignored is None:
            raise unfit(["it is too short to run, and captured anew its samples cannot be ignored"])
        if micro_batches > 1 and compiled.program.mixes_batch is not None and not self.plan.degrees.per_micro_batch:
            raise PlanError(f"accumulate = {micro_batches} would change the loss: {compiled.program.mixes_batch}")
        return compiled, [{n: t.to(self.device) for n, t in piece.items()} for piece in pieces], is_padded

    def forward_backward(self, batch: Mapping[str, Any] | Sequence[Any]) -> torch.Tensor:
        """One step's loss and gradients; returns the loss of the global batch, equal on every rank: where the plan says
        `per_micro_batch`, the mean of the losses of its micro-batches.

        `batch` is this rank's part of the global batch: `micro_batch × accumulate` sequences. Ranks that differ only
        in `tp` pass the same data. With fewer sequences, on some ranks or all, the batch is padded where samples can
        be ignored. Another sequence length, or another number of sequences on all ranks, captures
        the model again, once for each shape.

        Before anything is sent one all-gather of 8 × (4 + 2 × inputs) bytes a rank, on the host, compares step,
        shapes and data of the ranks. Raises `RuntimeInputError` on all ranks where those do not agree, or where a
        batch has a wrong name, shape or dtype.
        """
        compiled, micro_batches, _ = self._prepared(batch, STEP, self.plan.degrees.accumulate)
        program = compiled.program
        compiled.code_modules(outputs=False)
        denominators = self._denominators(compiled, micro_batches)
        averages = program.loss_reduction == "mean" or self.plan.degrees.per_micro_batch
        earlier = self._set_aside_deferred()
        loss = torch.zeros((), device=self.device)
        for index, values in enumerate(micro_batches):
            zero.before_micro_batch(self, self.plan.degrees, last=index == len(micro_batches) - 1)
            self._streams.training = True
            results = self(compiled, {**values, **denominators[index]}, False, (self._step, index))
            out = results[program.loss] / (len(micro_batches) if averages else 1)
            out.backward()
            loss = loss + out.detach()
            with torch.no_grad():
                for name, update in program.updates.items():
                    self._buffer(name).copy_(results[update])
        self._sum_deferred()
        for parameter, grad in earlier:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        complete_gradients(program, dict(self.named_parameters()))
        self._step += 1
        return loss

    @torch.no_grad()
    def _denominators(self, compiled: Compiled, micro_batches: MicroBatches) -> list[dict[str, torch.Tensor]]:
        """What the loss of each micro-batch is divided by, by name: the sum over all of them, or its own."""
        name = compiled.program.denominator
        if name is None:
            return [{} for _ in micro_batches]
        own = [compiled.denominator(values) for values in micro_batches]
        if not self.plan.degrees.per_micro_batch:
            own = [torch.stack(own).sum(0)] * len(own)
        return [{name: one} for one in own]

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """This rank's batches, as long as every rank has one: one all-gather of a few integers for each. Collective.

        Raises `RuntimeInputError` on all ranks, naming them, where some run out of data before the others.
        """
        return self._agreement.together(loader)

    def _deferred(self) -> Iterator[tuple[MeshDim, list[nn.Parameter]]]:
        """Per mesh dimension, the parameters whose gradient sum is deferred to once a step."""
        for name, dim in self.rank_mesh.dims.items():
            by_zero = name == "dp" and self.plan.degrees.zero > 0
            if dim.degree > 1:
                own = [p for n, p in self.named_parameters() if name in self._held[n].deferred]
                yield dim, [p for p in own if not (by_zero and zero.is_sharded(p))]

    def _set_aside_deferred(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients of earlier calls are summed already; keep them out of this call's deferred sum."""
        found = {p: p.grad for _, parameters in self._deferred() for p in parameters if p.grad is not None}
        for parameter in found:
            parameter.grad = None
        return list(found.items())

    @torch.no_grad()
    def _sum_deferred(self) -> None:
        for dim, parameters in self._deferred():
            sum_over([g for p in parameters if (g := local_gradient(p)) is not None], dim.group)

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Any] | Sequence[Any]) -> dict[str, torch.Tensor]:
        """Loss and outputs of one micro-batch without gradients; outputs are DTensors with global shapes.

        After `eval()` this is what the unmodified model computes in eval mode, captured when first asked for; in
        training mode it is the training program without dropout. Where ranks hold different numbers of sequences the
        batch is padded, and only the loss is returned.
        """
        compiled, (values,), is_padded = self._prepared(batch, EVALUATION, 1)
        program = compiled.program
        if program.denominator is not None:
            values[program.denominator] = compiled.denominator(values)
        compiled.code_modules(outputs=True)
        self._streams.training = not self.training  # what a model in eval mode still draws is meant
        scope = self(compiled, values, True, (self._step, 0))
        found = {"loss": scope[program.loss]}
        whole = self.rank_mesh.device_mesh.size() == 1
        for key, name in program.outputs.items() if not is_padded else ():
            dims, types = compiled.analysis.outer[name], compiled.types[name]
            found[key] = scope[name] if whole else as_dtensor(scope[name], dims, types, self.rank_mesh)
        return found

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their global 2-norm is at most `max_norm`; returns the norm before."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        norm = gradient_norm(parameters, dist.get_world_size() if dist.is_initialized() else 1, self.device)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            grad = local_gradient(parameter)
            assert grad is not None
            grad.mul_(scale.to(grad.dtype))
        return norm

    # Reading.

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
        lines = [f"ParallelModel(tp={degrees.tp}, dp={degrees.dp}, zero={degrees.zero})"]
        for i, block in enumerate(self.program.blocks):
            uses = len(self.program.uses_of_block(i))
            lines.append(f"\n# block {i}: {block.name}, called {uses} time{'s' * (uses > 1)}\n{self.code(i)}")
        return "\n".join(lines)


def readable(code: str) -> str:
    """Generated code without module prefixes and without the deletions that free memory early."""
    code = re.sub(r";  (\w+ = )+None(?=\n|$)", "", code)
    return re.sub(r"autopar_runtime_(?:passes_)?(?:conversions|vocabulary|regather|randomness)_", "", code).strip()


def _within(segment: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with a segment's parameters gathered and added to those it is given."""

    def outer(own: Mapping[str, torch.Tensor], *arguments: Any) -> Any:
        return segment(lambda more, *inner: run({**own, **more}, *inner), *arguments)

    return outer


def _owners(program: Program) -> dict[str, int | None]:
    """The call that alone uses a parameter, None where several do (tied weights)."""
    owners: dict[str, int | None] = {}
    for index, call in enumerate(program.calls):
        for name in call.arguments:
            if isinstance(name, str) and name in program.parameters:
                owners[name] = index if owners.get(name, index) == index else None
    return owners
