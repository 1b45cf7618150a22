"""`ParallelModel`: what the user holds and trains. Global names and shapes outside, shards and collectives inside."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeInputError
from autopar.ir.plan import Plan
from autopar.ir.program import CallSite, Program
from autopar.runtime import zero
from autopar.runtime.codegen import generate
from autopar.runtime.execute import constant_values, graph_module, run_calls
from autopar.runtime.gradients import gradient_norm, local_gradient, sum_over
from autopar.runtime.inputs import local_inputs, split_micro_batches
from autopar.runtime.mesh import MeshDim, RankMesh
from autopar.runtime.one_process import attributes, boundary_types
from autopar.runtime.outputs import as_dtensor
from autopar.runtime.parameters import Held, held, local_value, make_parameter, zero_dim
from autopar.runtime.passes.evaluation import use_running_statistics
from autopar.runtime.pieces import by_whole, complete_gradients, joined, with_pieces
from autopar.runtime.randomness import Streams
from autopar.runtime.state import optimizer_state, whole_state
from autopar.trace.analysis import Analysis, analyse


class Segment(nn.Module):
    """One call of a block: its parameters, and the generated code that all calls of the block share."""

    def __init__(self, call: CallSite, names: Mapping[str, Held]) -> None:
        super().__init__()
        self.call = call
        self.names = dict(names)

    def forward(self, code: fx.GraphModule, *arguments: Any) -> tuple[torch.Tensor, ...]:
        filled = [
            local_value(getattr(self, attribute(a)), self.names[a]) if isinstance(a, str) and a in self.names else value
            for a, value in zip(self.call.arguments, arguments, strict=True)
        ]
        out: tuple[torch.Tensor, ...] = code(*filled)
        return out


def attribute(name: str) -> str:
    """A parameter's name as an attribute of the module that holds it."""
    return name.replace(".", "__")


class ParallelModel(nn.Module):
    """A model split over the ranks of a mesh according to a `Plan`.

    `forward_backward(batch)` takes this rank's part of the global batch and leaves summed gradients; parameters are
    DTensors under the model's own names, an unequal packing in pieces (`named_parameters`). Every method is collective:
    all ranks call it in the same order.
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
    ) -> None:
        super().__init__()
        self.program, self.plan, self.rank_mesh, self.device = program, plan, mesh, device
        self.analysis: Analysis = analyse(program, plan.mesh)
        self.types = boundary_types(program, plan.blocks)
        self._streams = Streams(mesh.dims, seed, device)
        self._step = 0
        self._modules_by_use: dict[bool, list[fx.GraphModule]] = {}
        self._hold_buffers(source)
        self._constant_values: tuple[tuple[int, ...], dict[str, torch.Tensor]] | None = None
        self._held = {
            name: held(name, self.analysis.outer[name], self.types[name], plan.mesh) for name in program.parameters
        }
        source = with_pieces(program, source)
        owners = _owners(program)
        self._zero_dims: dict[nn.Parameter, int | None] = {}
        self.segments = nn.ModuleList()
        for index, call in enumerate(program.calls):
            own = {n: self._held[n] for n in call.arguments if isinstance(n, str) and owners.get(n) == index}
            segment = Segment(call, own)
            self._fill(segment, own, source)
            zero.shard(segment, self._zero_dims, plan.degrees, mesh)
            self.segments.append(segment)
        self._shared = {n: self._held[n] for n, owner in owners.items() if owner is None}
        self._fill(self, self._shared, source)
        zero.shard(self, self._zero_dims, plan.degrees, mesh, root=True)
        self._zero_dims.clear()  # FSDP2 has replaced the parameters

    def _fill(self, module: nn.Module, names: Mapping[str, Held], source: Callable[[str], torch.Tensor]) -> None:
        mesh = self.rank_mesh
        at = [mesh.dims[n].coordinate for n in self.plan.mesh.names]
        for name, how in names.items():
            info = self.program.parameters[name]
            whole = source(name).to(info.dtype)
            made = make_parameter(
                how, whole, self.plan.mesh, at, mesh.tensor_mesh, self.device, requires_grad=info.requires_grad
            )
            self._zero_dims[made] = zero_dim(how, self.plan.degrees.dp_shard)
            module.register_parameter(attribute(name), made)

    def _hold_buffers(self, source: Callable[[str], torch.Tensor]) -> None:
        """Every buffer that a state dict holds, that forward changes, or that constants are made of; whole."""
        used = {*self.program.updates, *self.program.constants.buffers}
        for name, info in self.program.buffers.items():
            if info.persistent or not used.isdisjoint((name, *info.aliases)):
                value = source(name).to(info.dtype).to(self.device, copy=True)
                self.register_buffer(attribute(name), value, persistent=info.persistent)

    def _buffer(self, name: str) -> torch.Tensor:
        """A buffer that is held, by any of its names."""
        first = next(n for n, info in self.program.buffers.items() if name in (n, *info.aliases))
        found: torch.Tensor = getattr(self, attribute(first))
        return found

    def _constants(self) -> dict[str, torch.Tensor]:
        """Values of the constant part, made again when a buffer that they are made of was written to."""
        literal = {n.name for n in self.program.constants.graph.nodes if n.meta.get("literal") is not None}
        names = [n for i, n in enumerate(self.program.constants.buffers) if f"buffer_{i}" not in literal]
        buffers = {name: self._buffer(name) for name in names}
        versions = tuple(buffer._version for buffer in buffers.values())
        if self._constant_values is None or self._constant_values[0] != versions:
            made = constant_values(self.program.constants, buffers, str(self.device))
            self._constant_values = versions, made
        return self._constant_values[1]

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
        """Parameters under the model's names; a tied parameter once, or under all its names.

        An unequal packing, such as queries, keys and values of different sizes in one projection, is held in pieces
        named after their rows: ``qkv_proj.weight[0:3072]``. `state_dict` joins them.
        """
        if not recurse:  # what torch asks of one module of the tree
            yield from super().named_parameters(prefix, False, remove_duplicate)
            return
        owners = self._owner_of()
        start = prefix + ("." if prefix else "")
        for name, info in self.program.parameters.items():
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
        if outputs not in self._modules_by_use:
            made = []
            wanted = self._needed_results(outputs=outputs)
            for i, block in enumerate(self.program.blocks):
                generated = generate(
                    self.analysis,
                    block,
                    i,
                    self.plan.blocks[i],
                    self.plan.mesh,
                    device=str(self.device),
                    keep=wanted[i],
                    regather=self.plan.regather,
                )
                if outputs:
                    use_running_statistics(generated.graph)
                read = attributes(generated, self.rank_mesh, self._streams)
                made.append(graph_module(generated.graph, f"Block{i}", read))
            self._modules_by_use[outputs] = made
        return self._modules_by_use[outputs]

    def _needed_results(self, *, outputs: bool) -> list[list[str]]:
        """Outputs per block that are needed; training drops the model's, so that no rank gathers full logits.

        Evaluation drops new values of buffers.
        """
        used = {a for call in self.program.calls for a in call.arguments} | self.program.invariant
        if outputs:
            used = (used - set(self.program.updates.values())) | set(self.program.outputs.values())
        return [
            [
                o
                for k, o in enumerate(block.outputs)
                if any(call.results[k] in used for call in self.program.uses_of_block(i))
            ]
            for i, block in enumerate(self.program.blocks)
        ]

    def forward(self, values: dict[str, Any], phase: str, outputs: bool = False) -> dict[str, Any]:
        """Run the calls of one phase over named local values; used by `forward_backward` and `evaluate`."""
        modules = self.code_modules(outputs=outputs)
        kept = self._needed_results(outputs=outputs)
        shared = {n: local_value(getattr(self, attribute(n)), how) for n, how in self._shared.items()}
        placeholders = dict.fromkeys(self.program.parameters) | shared
        state = {name: self._buffer(name) for name in self.program.updates}
        scope = placeholders | self._constants() | state | values
        calls = [(i, c) for i, c in enumerate(self.program.calls) if c.phase == phase]

        def function_of(k: int, call: CallSite) -> Callable[..., Any]:
            segment = self.segments[calls[k][0]]
            return lambda *arguments: segment(modules[call.block], *arguments)

        def results_of(call: CallSite) -> Sequence[str]:
            block = self.program.blocks[call.block]
            pairs = zip(block.outputs, call.results, strict=True)
            return [r for o, r in pairs if o in kept[call.block]]

        run_calls([c for _, c in calls], function_of, scope, results_of)
        wanted = {self.program.loss, *(self.program.outputs if outputs else self.program.updates).values()}
        return {name: scope[name] for name in wanted}

    def forward_backward(self, batch: Mapping[str, Any] | Sequence[Any]) -> torch.Tensor:
        """One step's loss and gradients; returns the global mean loss, equal on every rank.

        `batch` is this rank's part of the global batch: `micro_batch × accumulate` sequences. Ranks that differ only
        in `tp` pass the same data. Raises `RuntimeInputError` on a wrong name, shape or dtype.
        """
        degrees = self.plan.degrees
        self.code_modules(outputs=False)
        inputs = local_inputs(self.program, degrees, batch, self.device)
        micro_batches = split_micro_batches(self.program, inputs, degrees.accumulate)
        denominator = self.program.denominator
        total: torch.Tensor | None = None
        if denominator is not None:
            with torch.no_grad():
                for values in micro_batches:
                    one = self._denominator(values)
                    total = one if total is None else total + one
        earlier = self._set_aside_deferred()
        loss = torch.zeros((), device=self.device)
        for index, values in enumerate(micro_batches):
            zero.before_micro_batch(self, degrees, last=index == len(micro_batches) - 1)
            self._streams.begin(self._step, index)
            known = values if denominator is None else {**values, denominator: total}
            results = self(known, "main")
            out = results[self.program.loss]
            if self.program.loss_reduction == "mean":
                out = out / len(micro_batches)
            out.backward()
            loss = loss + out.detach()
            with torch.no_grad():
                for name, update in self.program.updates.items():
                    self._buffer(name).copy_(results[update])
        self._sum_deferred()
        for parameter, grad in earlier:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        complete_gradients(self.program, dict(self.named_parameters()))
        self._step += 1
        return loss

    def _denominator(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss's denominator of one micro-batch, summed over ranks by its own conversions."""
        index = next(i for i, c in enumerate(self.program.calls) if c.phase == "denominator")
        call = self.program.calls[index]
        scope = {**self._constants(), **values}
        arguments = [scope[a] if isinstance(a, str) else a for a in call.arguments]
        out: torch.Tensor = self.code_modules(outputs=False)[call.block](*arguments)[0]
        return out

    def _deferred(self) -> Iterator[tuple[MeshDim, list[nn.Parameter]]]:
        """Per mesh dimension, the parameters whose gradient sum is deferred to once a step."""
        for name, dim in self.rank_mesh.dims.items():
            if dim.degree > 1:
                own = [(p, self._held[n]) for n, p in self.named_parameters() if name in self._held[n].deferred]
                yield dim, [p for p, how in own if not (name == "dp" and zero.is_sharded(how, self.plan.degrees))]

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
        """Loss and outputs of one micro-batch without gradients; outputs are DTensors with global shapes."""
        values = local_inputs(self.program, self.plan.degrees, batch, self.device, micro_batches=1)
        if self.program.denominator is not None:
            values[self.program.denominator] = self._denominator(values)
        self.code_modules(outputs=True)
        self._streams.begin(self._step, 0, training=False)
        scope = self(values, "main", True)
        found = {"loss": scope[self.program.loss]}
        for key, name in self.program.outputs.items():
            dims, types = self.analysis.outer[name], self.types[name]
            whole = self.rank_mesh.device_mesh.size() == 1
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


def _owners(program: Program) -> dict[str, int | None]:
    """The call that alone uses a parameter, None where several do (tied weights)."""
    owners: dict[str, int | None] = {}
    for index, call in enumerate(program.calls):
        for name in call.arguments:
            if isinstance(name, str) and name in program.parameters:
                owners[name] = index if owners.get(name, index) == index else None
    return owners
