"""Pipeline stages on torch.distributed.pipelining: its stages, messages and runtime of action lists.

autopar decides which values cross (`autopar.ir.stages`), the order of actions (`autopar.ir.schedules`), and the
micro-batches: every stage takes their inputs from its own rank's batch. autopar also decides when data-parallel ranks
sum gradients:

* If the backward pass is whole, gradients follow the ZeRO stage in every micro-batch, as without a pipeline.
* If the backward pass is split, a stage keeps its parameters gathered and its gradients whole until its last action.
  FSDP2 would sum too early: it sums when the input's gradient is ready, and the weights' gradients come later.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from autopar._torch import private
from autopar.capture.nodes import value_infos
from autopar.errors import RuntimeInputError
from autopar.ir.degrees import Degrees
from autopar.ir.schedules.action import Action
from autopar.ir.schedules.registry import SCHEDULES, actions
from autopar.ir.stages import Stage, separates
from autopar.runtime.distributed.hang_report import Place, frames_of, rank_position
from autopar.runtime.distributed.mesh import MeshDim, pipeline_messages
from autopar.runtime.model import zero
from autopar.runtime.model.compiled import CompiledProgram
from autopar.runtime.model.outputs import at_least_float32
from autopar.runtime.model.stage import StageModule

_Values = dict[str, Any]
RunStage = Callable[[StageModule, _Values, int], _Values]  # of named values and a micro-batch


class _Submodule(nn.Module):
    """The module that torch's stage calls. It hides the stage's module, whose FSDP2 state torch must not touch."""

    def __init__(self, module: StageModule, stage: Stage, loss: str, is_last: bool, detaches: bool) -> None:
        super().__init__()
        self.hidden = (module,)
        self.stage, self.loss, self.is_last, self.detaches = stage, loss, is_last, detaches
        self.run: RunStage | None = None

    def parameters(self, recurse: bool = True) -> Any:
        return self.hidden[0].parameters()

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self.run is not None
        values = dict(zip(self.stage.receives, received, strict=True))
        results = self.run(self.hidden[0], values, int(index))
        if self.is_last:
            return (results[self.loss],)
        sent = [results[name].contiguous() for name in self.stage.sends]
        # a split backward pass detaches sent values in place; views and received values must not change
        return tuple(v.clone() if self.detaches and (v._is_view() or v.is_leaf) else v for v in sent)


class _TorchStage(PipelineStage):
    """torch's stage with buffers for messages as long as they are needed, and our moments for sums over ranks."""

    submod: _Submodule

    def __init__(
        self, submodule: _Submodule, *arguments: Any, degrees: Degrees, separates: bool, **options: Any
    ) -> None:
        super().__init__(submodule, *arguments, **options)
        self.degrees, self.separates = degrees, separates
        self.is_final = True  # whether this run of the schedule is the step's last
        self.splits_backward = degrees.splits_backward

    @property
    def module(self) -> StageModule:
        return self.submod.hidden[0]

    # Buffers: torch allocates those of all micro-batches at once and keeps them.

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            _forget(infos)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for infos in self.grad_recv_info.values():
            _forget(infos)

    def _get_recv_ops(self, recv_infos: Any) -> Any:
        _allocate(recv_infos, self.device)
        return super()._get_recv_ops(recv_infos)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        _allocate(self.grad_recv_info[mb_index], self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        out = super().forward_one_chunk(fwd_chunk_id, *arguments, **options)
        _forget(self.args_recv_info[fwd_chunk_id])  # what backward needs of them autograd holds
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Where the parts cannot be separated, the weights' is run with the other."""
        whole = full_backward or not self.separates
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=whole, last_backward=last_backward)
        if self.has_backward:
            grads = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in grads)
            if not self.is_last:
                _forget(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.separates:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    # Sums over data-parallel ranks.

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if self.splits_backward:
            zero.set_last(self.module, False)
        else:
            zero.before_backward(self.module, self.degrees, last=last_backward and self.is_final)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.splits_backward and self.is_final:
            zero.sum_held_gradients(self.module)


def _allocate(infos: Sequence[Any], device: torch.device) -> None:
    for info in infos:
        if info.tensor_meta is not None and not info.is_root_arg:
            meta = info.tensor_meta
            info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=device)


def _forget(infos: Sequence[Any]) -> None:
    for info in infos:
        if not info.is_root_arg:
            info.buffer = None


class Pipeline:
    """One rank's stages of a compiled program and the schedule that runs them."""

    def __init__(
        self,
        compiled: CompiledProgram,
        modules: Mapping[int, StageModule],
        pipeline: MeshDim,
        degrees: Degrees,
        *,
        trains: bool,
    ) -> None:
        stages, loss = compiled.stages, compiled.program.loss
        self.place = Place(degrees=degrees, pipeline=pipeline)
        self.no_loss = at_least_float32(
            torch.zeros((), dtype=value_infos(compiled.program)[loss].dtype, device=compiled.device)
        )
        self.count = degrees.micro_batches if trains else 1
        order = _there_and_back(degrees)
        if trains:
            order = actions(degrees.schedule, degrees.pp, degrees.virtual_stages, self.count)
        device = compiled.device
        self._torch_stages = []
        for number in sorted(modules):
            stage = stages[number]
            is_last, detaches = number == len(stages) - 1, degrees.splits_backward
            submodule = _Submodule(modules[number], stage, loss, is_last, detaches)
            sent = _loss_meta(compiled) if is_last else compiled.empty_values(stage.sends, "meta")
            torch_stage = _TorchStage(
                submodule,
                number,
                len(stages),
                device,
                input_args=compiled.empty_values(stage.receives, "meta"),
                output_args=sent,
                group=pipeline_messages(pipeline),
                degrees=degrees,
                separates=separates(compiled.program, stage, compiled.recomputed),
            )
            self._torch_stages.append(torch_stage)
        loss_fn = _same if trains else None
        self._schedule = private.pipeline_runtime(list(self._torch_stages), self.count, loss_fn)
        self._schedule._prepare_schedule_with_comms(
            {rank: [private.pipeline_action(str(a)) for a in todo] for rank, todo in enumerate(order)}
        )
        if not trains:  # torch checks that every forward pass has its backward pass, but runs what is left here
            lowered = self._schedule.pipeline_order_with_comms
            for rank, todo in lowered.items():
                lowered[rank] = [a for a in todo if a.computation_type.value in ("F", "SEND_F", "RECV_F")]

    def step(self, run: RunStage, *, is_final: bool) -> torch.Tensor:
        """Run the schedule forward and backward; the sum of the losses where the last stage is, else 0."""
        losses: list[torch.Tensor] = []
        numbers = torch.arange(self.count)
        with self._running(run, is_final):
            self._schedule.step(index=numbers, target=numbers, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else self.no_loss.clone()

    def evaluate(self, run: RunStage) -> None:
        """Run one micro-batch forward."""
        with self._running(run, False):
            self._schedule.eval(index=torch.arange(1), return_outputs=False)
        for stage in self._torch_stages:
            stage.clear_runtime_states()

    @contextmanager
    def _running(self, run: RunStage, is_final: bool) -> Iterator[None]:
        """The stages set to `run`; an error says which stage and micro-batch it is of."""
        for stage in self._torch_stages:
            stage.submod.run, stage.is_final = run, is_final
        try:
            yield
        except Exception as error:
            cause = (
                error.__cause__ if isinstance(error.__cause__, Exception) else error
            )  # torch wraps what a stage raises
            cause.add_note(rank_position(frames_of(error)))
            raise cause from None
        finally:
            for stage in self._torch_stages:
                stage.submod.run = None


def _same(output: Any, target: Any) -> torch.Tensor:
    """The loss is what the last stage returns."""
    out: torch.Tensor = output[0]
    return out


def _there_and_back(degrees: Degrees) -> tuple[tuple[Action, ...], ...]:
    """Per rank, the passes of one micro-batch."""
    stages = range(degrees.num_stages)
    every = [Action(stage, "F", 0) for stage in stages] + [Action(stage, "B", 0) for stage in reversed(stages)]
    return tuple(tuple(a for a in every if degrees.rank_of_stage(a.stage) == rank) for rank in range(degrees.pp))


def _loss_meta(compiled: CompiledProgram) -> tuple[torch.Tensor]:
    (meta,) = compiled.empty_values((compiled.program.loss,), "meta")
    return (at_least_float32(meta.detach()).requires_grad_(meta.requires_grad),)


def refuse_compiling(degrees: Degrees) -> None:
    """Raise `RuntimeInputError` where compiled blocks cannot run the schedule."""
    if degrees.splits_backward:
        whole = ", ".join(name for name, schedule in SCHEDULES.items() if not schedule.splits_backward)
        raise RuntimeInputError(
            f"schedule {degrees.schedule} runs the backward pass in two parts, which torch.compile does not "
            f"support; use a schedule with whole backward passes ({whole}), or do not compile"
        )
