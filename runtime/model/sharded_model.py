"""`ShardedModel`: the parameters, buffers and state that one rank holds, under the model's own names."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar._torch.private import IncompatibleKeys
from autopar.errors import PlanError, RuntimeInputError
from autopar.ir.degrees import offload_problems
from autopar.ir.offload import OPTIMIZER
from autopar.ir.plan import Plan
from autopar.ir.precision import summed_dtype
from autopar.ir.program import Program, StateInfo
from autopar.ir.sharding import owned_by
from autopar.ir.stages import Stage, stage_of_buffers, stages_by_parameter
from autopar.ir.storage import Storage, zero_dim_of
from autopar.runtime.codegen.randomness import Streams
from autopar.runtime.distributed.hang_report import reports_position
from autopar.runtime.distributed.mesh import MeshDim, RankMesh, precision_problems
from autopar.runtime.model import zero
from autopar.runtime.model.compiled import CompiledProgram
from autopar.runtime.model.stage import StageModule, attribute
from autopar.runtime.model.tied_parameters import TiedParameters
from autopar.runtime.offload.backward_step import BackwardStep
from autopar.runtime.offload.host_memory import HostCopies, HostParameters
from autopar.runtime.parameters.gradients import gradient_norm, local_gradient, nonfinite_error, sum_over
from autopar.runtime.parameters.initial import InitialParts
from autopar.runtime.parameters.packed import complete_gradients, names_of_state
from autopar.runtime.parameters.placement import make_parameter
from autopar.runtime.parameters.shown_tensor import as_shards, flat_state, parts_of, whole_of
from autopar.runtime.parameters.user_view import (
    has_hooks,
    parameters_of_model,
    run_hooks,
    show_gradient,
    show_parameter,
)


class ShardedModel(nn.Module):
    """The stages of a model that one rank holds. Without a pipeline it is the whole model.

    `source` gives whole parameters and is not kept. With `sent` rank 0 alone asks it, and sends parts. `buffers` gives
    buffers, some of them later. `base` is the program compiled for the plan's shapes. `placements` says how each
    parameter is stored, by name.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        mesh: RankMesh,
        source: Callable[[str], torch.Tensor],
        device: torch.device,
        streams: Streams,
        buffers: Callable[[str], torch.Tensor],
        sent: bool = False,
    ) -> None:
        super().__init__()
        self.program, self.plan, self.rank_mesh, self.device, self.streams = program, plan, mesh, device, streams
        if problems := [*offload_problems(plan.degrees), *precision_problems(plan.degrees.precision, device)]:
            raise PlanError("the plan cannot run", problems)
        self._buffer_source = buffers
        for name, info in program.buffers.items():  # others are made when they are asked for
            if info.persistent or not {name, *info.aliases}.isdisjoint(program.updates):
                self.buffer(name)
        self.base = CompiledProgram(
            program=program, plan=plan, buffers=self.buffer, mesh=mesh, streams=streams, device=device
        )
        self.placements = self.base.placements
        stages = self.base.stages
        self.ties = TiedParameters(stages_by_parameter(program, stages), plan.degrees, mesh)
        self._by_stage = dict[int, StageModule]()
        parts = InitialParts(program, plan, mesh, source, sent=sent)
        for stage in stages:
            if (at := plan.degrees.rank_of_stage(stage.index)) == mesh.stage_rank:
                self._by_stage[stage.index] = self._stage_module(stage, parts)
            else:
                StageModule(program, stage, self.placements, partial(parts.pass_on, at))
        parts.end()
        self.stages = nn.ModuleDict({str(index): module for index, module in self._by_stage.items()})
        self.copies = HostCopies(device)
        self._on_host: HostParameters | None = None
        self._backward_step: BackwardStep | None = None
        owners: dict[str, nn.Module] = {}  # of a parameter of several stages, the first
        for module in self.stage_modules().values():
            owners = module.owner_of() | owners
        infos = program.every_parameter
        # this rank's parameters as blocks compute with them: the stored ones, or the device's copies of them
        self._computed: dict[str, nn.Parameter] = {n: getattr(owners[n], attribute(n)) for n in infos if n in owners}
        has_two_meshes = any(s.is_of_experts for s in self.placements.values())
        for name, parameter in self._computed.items():
            show_parameter(parameter, name, self.placements[name], has_two_meshes=has_two_meshes)
        if plan.degrees.offloads(OPTIMIZER):
            self._on_host = HostParameters(self._computed, self.placements, self.copies)
        self._parameters_of_model = parameters_of_model(program, dict(self.stored_parameters()))
        self._summed = {p: summed_dtype(infos[n].dtype, plan.degrees) for n, p in self._computed.items()}

    def _stage_module(self, stage: Stage, parts: InitialParts) -> StageModule:
        zero_dims: dict[nn.Parameter, int | None] = {}

        def fill(module: nn.Module, names: Mapping[str, Storage]) -> None:
            dims = self._fill(module, names, parts)
            if not isinstance(module, StageModule):
                of_experts = any(s.is_of_experts for s in names.values())
                zero.shard(module, dims, self.plan.degrees, self.rank_mesh, of_experts=of_experts)
                dims = {parameter: None for parameter, dim in dims.items() if dim is None}  # frees what is sharded now
            zero_dims.update(dims)

        module = StageModule(self.program, stage, self.placements, fill)
        zero.shard(module, zero_dims, self.plan.degrees, self.rank_mesh, root=True)
        return module

    def stage_modules(self) -> dict[int, StageModule]:
        """This rank's pipeline stages by number; stage 0 alone without a pipeline."""
        return self._by_stage

    @property
    def segments(self) -> list[nn.Module]:
        """The modules that each hold the parameters of one call of a block, in order."""
        return [segment for module in self.stage_modules().values() for segment in module.segments]

    def _fill(
        self, module: nn.Module, names: Mapping[str, Storage], parts: InitialParts
    ) -> dict[nn.Parameter, int | None]:
        """Register parameters on a module; returns the dimension of each that ZeRO shards."""
        zero_dims = dict[nn.Parameter, int | None]()
        for name, storage in names.items():
            used = name in self.program.parameters
            zero_dim = zero_dim_of(self.plan.degrees, storage) if used else None
            over = zero.mesh_of(self.plan.degrees, self.rank_mesh, storage, zero_dim)
            requires_grad = self.program.every_parameter[name].requires_grad
            parameter = make_parameter(storage, parts.of(name, storage), over, self.device, requires_grad=requires_grad)
            zero_dims[parameter] = zero_dim
            module.register_parameter(attribute(name), parameter)
        return zero_dims

    def buffer(self, name: str) -> torch.Tensor:
        """Give a buffer of the model.

        Args:
            name: Any of the buffer's names in the model.

        Returns:
            The whole buffer on this rank's device.

        Example:
            >>> [parallel.buffer(name) for name in parallel.program.buffers]
            []
        """
        first, info = next((n, i) for n, i in self.program.buffers.items() if name in (n, *i.aliases))
        if attribute(first) not in self._buffers:
            value = self._buffer_source(first).to(info.dtype).to(self.device, copy=True)
            self.register_buffer(attribute(first), value, persistent=info.persistent)
        buffer_value: torch.Tensor = getattr(self, attribute(first))
        return buffer_value

    # Names: the model's own, whatever the layout.

    def stored_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters as they are stored, with each part of an unequal packing."""
        for name, parameter in self._computed.items():
            yield name, parameter if self._on_host is None else self._on_host.of(name, parameter)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over this rank's parameters under the model's names; unused parameters come last.

        Args:
            prefix: Text before every name, as in torch.
            recurse: As in torch; `False` asks for this module's own parameters, of which there are none.
            remove_duplicate: Whether a tied parameter comes once. Otherwise it comes under all its names.

        Yields:
            Pairs of name and parameter. A parameter that is split shows the model's shape.

        Example:
            >>> [name for name, _ in parallel.named_parameters()]
            ['0.weight', '0.bias', '2.weight', '2.bias']
        """
        if not recurse:  # what torch asks of one module of the tree
            yield from super().named_parameters(prefix, False, remove_duplicate)
            return
        start = prefix + ("." if prefix else "")
        aliases = {} if remove_duplicate else {info.whole_name: info.aliases for info in self._infos()}
        for name, parameter in self._parameters_of_model.items():
            for alias in (name, *aliases.get(name, ())):
                yield start + alias, parameter

    def _infos(self) -> Iterable[StateInfo]:
        return self.program.every_parameter.values()

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Give the parameters and persistent buffers under the model's names and shapes.

        `torch.distributed.checkpoint` saves it, and loads into it in place. A checkpoint does not depend on the plan.

        Args:
            destination: A dict to fill, as in torch; a new one by default.
            prefix: Text before every name.
            keep_vars: Ignored; torch passes it.

        Returns:
            Values by name: DTensors, or `FlatShards` for parameters that are stored under another shape.

        Example:
            >>> tuple(parallel.state_dict()["0.weight"].shape)
            (12, 8)
        """
        aliases = {info.whole_name: info.aliases for info in self._infos()}
        out: dict[str, Any] = {}
        for name, parameter in self.named_parameters():
            out |= dict.fromkeys((name, *aliases[name]), flat_state(parameter.detach()))
        for first, buffer, persistent in self.own_buffers():
            if persistent:
                out |= dict.fromkeys((first, *self.program.buffers[first].aliases), buffer)
        destination = {} if destination is None else destination
        destination.update({prefix + name: value for name, value in out.items()})
        return destination

    def own_buffers(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, value and persistence of each buffer that is state, from the stage that changes it."""
        changed = stage_of_buffers(self.program, self.base.stages)
        for first, info in self.program.buffers.items():
            changing = {changed[n] for n in (first, *info.aliases) if n in changed}
            if (info.persistent or changing) and changing <= self.stage_modules().keys():
                yield first, self.buffer(first), info.persistent

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Copy weights into this model: the `state_dict` of any plan, or whole tensors. Collective.

        Args:
            state_dict: Values by the model's names. Ranks pass whole tensors that are equal, or their split tensors.
            strict: Whether missing and unknown names raise. A tied parameter is given under any of its names.
            assign: Must be `False`: optimizers and ZeRO hold the parameters.

        Returns:
            The missing and the unknown names, as in torch.

        Raises:
            RuntimeInputError: A name is missing or unknown, a shape is another, or `assign` is on.

        Example:
            >>> parallel.load_state_dict(parallel.state_dict())
            <All keys matched successfully>
        """
        if assign:
            raise RuntimeInputError("assign=True would replace parameters that the optimizer holds; leave it out")
        names = names_of_state(self.program)
        state = self.state_dict()
        groups = [group for group in names if group[0] in state]
        given = {group[0]: next((n for n in group if n in state_dict), None) for group in groups}
        missing = [first for first, name in given.items() if name is None]
        known = {name for group in names for name in group}
        unknown = [name for name in state_dict if name not in known]
        other = [
            f"{name} has shape {tuple(state_dict[name].shape)} instead of {tuple(state[first].shape)}"
            for first, name in given.items()
            if name is not None and state_dict[name].shape != state[first].shape
        ]
        if other or (strict and (missing or unknown)):
            raise RuntimeInputError(
                f"the state does not fit the model: missing {missing[:3]}, unknown {unknown[:3]}, shapes {other[:3]}; "
                "pass the state of the same model, or strict=False if names may be missing"
            )
        for first, name in given.items():
            if name is not None:
                whole = whole_of(state_dict[name]).detach()
                for offsets, sizes, values in as_shards(state[first]).chunks:
                    box = [slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)]
                    values.detach().copy_(whole[tuple(box)])
        return IncompatibleKeys(missing, unknown)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Give an optimizer's state under the model's names and shapes.

        Args:
            optimizer: An optimizer of this model's parameters.

        Returns:
            Sharded values by parameter name and key, such as ``0.weight.exp_avg``. Values load in place.

        Example:
            >>> optimizer = torch.optim.AdamW(parallel.parameters())
            >>> loss = parallel.forward_backward(batch)
            >>> optimizer.step()
            >>> tuple(parallel.optimizer_state_dict(optimizer)["0.weight.exp_avg"].shape)
            (12, 8)
        """
        state: dict[str, Any] = {}
        for name, parameter in self.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                state[f"{name}.{key}"] = flat_state(value) if is_like else value
        return state

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """Gather every gradient as a whole tensor on every rank, for verification.

        Returns:
            Gradients by the model's names. They take the memory of the whole model.

        Example:
            >>> tuple(parallel.whole_gradients()["0.weight"].shape)
            (12, 8)
        """
        return {name: whole_of(p.grad).clone() for name, p in self.named_parameters() if p.grad is not None}

    # Gradients.

    def _deferred(self) -> Iterator[tuple[MeshDim, list[nn.Parameter]]]:
        """Per group of ranks, the parameters whose gradient sum is deferred to once a step."""
        data, experts = self.rank_mesh.data, self.rank_mesh.experts
        for dim, of_experts in ((data, False), (None if experts is None else experts.data, True)):
            if dim is not None and dim.degree > 1:
                whole = [(n, p) for n, p in self._computed.items() if not zero.is_zero_sharded(p)]
                yield dim, [p for n, p in whole if self.placements[n].is_of_experts == of_experts]
        for name, dim in self.rank_mesh.dims.items():
            if dim.degree > 1 and owned_by(name) == "parameters":
                yield dim, [p for n, p in self._computed.items() if name in self.placements[n].deferred]

    def _set_aside(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients of earlier calls are summed already; keep them out of what this call sums at its end."""
        late = [p for _, parameters in self._deferred() for p in parameters]
        late += [self._computed[name] for name in self.ties.names if name in self._computed]
        # a hook gets the gradient of one call
        late += [part for p in self.parameters() if has_hooks(p) for part in parts_of(p)]
        grads = {p: p.grad for p in late if p.grad is not None}
        for parameter in grads:
            parameter.grad = None
        return list(grads.items())

    def _sum_deferred(self) -> None:
        for dim, parameters in self._deferred():
            pairs = [(g, self._summed[p]) for p in parameters if (g := local_gradient(p)) is not None]
            sum_over(pairs, dim.group, self.device)

    def _forget_copies(self) -> None:
        """Drop the copies of master weights, which hold for one step."""
        for module in self.stage_modules().values():
            module.copies.clear()

    def _show_gradients(self, earlier: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Call hooks with the gradients of this step, add the gradients of earlier calls, and show them to the user."""
        if self._backward_step is not None:
            self._backward_step.wait()
        if self._on_host is not None:
            self._on_host.take_gradients()
        in_stages = self.plan.degrees.pp > 1
        parameters = list(self.parameters())
        complete_gradients(self.program, dict(self.stored_parameters()))
        for kind in ("gradient_hooks", "after_gradient_hooks"):
            for parameter in parameters:
                show_gradient(parameter, in_stages=in_stages)
                if parameter.grad is not None:
                    run_hooks(parameter, kind, in_stages=in_stages)
            if kind == "gradient_hooks":
                for stored, grad in earlier:
                    stored.grad = grad if stored.grad is None else stored.grad + grad
        if self._backward_step is not None:
            self._backward_step.update_late()

    def register_full_backward_hook(self, *_: Any, **__: Any) -> Any:
        """Raise: the generated code has no modules whose backward pass could be hooked.

        Args:
            _: Anything.
            __: Anything.

        Returns:
            Nothing.

        Raises:
            RuntimeInputError: Always.

        Example:
            >>> parallel.register_full_backward_hook(print)
            Traceback (most recent call last):
            autopar.errors.RuntimeInputError: backward hooks of a ParallelModel would never be called; ...
        """
        raise RuntimeInputError(
            "backward hooks of a ParallelModel would never be called; a hook on a parameter gets the "
            "gradient of all ranks: parameter.register_post_accumulate_grad_hook(hook)"
        )

    @reports_position
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`.

        Args:
            max_norm: The largest allowed norm.
            error_if_nonfinite: Whether a norm that is NaN or infinite raises, on all ranks, before any gradient
                changes. With a scaler leave it off: the scaler skips such a step.

        Returns:
            The norm before scaling, a float64 scalar that is equal on every rank.

        Raises:
            RuntimeInputError: The parameters step in the backward pass, or the norm is not finite. The message names
                the first such parameter, its ranks and the reason.

        Example:
            >>> norm = parallel.clip_grad_norm_(1.0)
            >>> norm.dtype
            torch.float64
        """
        if self._backward_step is not None:
            raise RuntimeInputError(
                "the parameters were updated in the backward pass, before all gradients were there to be clipped; "
                "clip by value in hooks, or step after the backward pass"
            )
        named = {name: p for name, p in self.stored_parameters() if p.grad is not None}
        parameters = list(named.values())
        norm = gradient_norm(named, self.ties.num_ranks, self.rank_mesh.device_mesh.size(), self.device)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise nonfinite_error(named, list(self.program.every_parameter), float(norm))
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            grad = local_gradient(parameter)
            assert grad is not None
            grad.mul_(scale.to(grad.dtype))
        return norm
