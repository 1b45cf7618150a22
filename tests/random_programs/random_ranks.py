"""Functions of gloo ranks: one step of a drawn program under a plan, captured once and read by every rank."""

import torch
from program_source import Source

from autopar.capture.record.file import from_bytes
from autopar.capture.request import Request
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planning.fixed import capture_for
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.verify.verify import this_ranks_part

Step = tuple[torch.Tensor, dict[str, torch.Tensor]]  # loss and whole gradients
LOGGER = "torch._subclasses.fake_tensor"  # tells at length why a capture at another sequence length failed


def captured(source: Source, degrees: Degrees) -> Program:
    """The program at the global batch, captured from one rank's part of it."""
    model, inputs = source.build()
    own = {name: value[: source.batch // degrees.dp] for name, value in inputs.items()}
    return capture_for(Request.of(model, own), degrees)


def one_step(rank: int, source: Source, plan: Plan, program_bytes: bytes) -> Step | None:
    """Loss and gradients of the plan's ranks, made whole; rank 0 returns them."""
    (model, inputs), program = source.build(), from_bytes(program_bytes)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parallel = ParallelModel(program, plan, lambda name: values[name].detach(), torch.device("cpu"))
    coordinate = parallel.rank_mesh.sample_ranks.coordinate
    loss = parallel.forward_backward(this_ranks_part(program, inputs, plan.degrees, coordinate))
    gradients = {name: grad.detach() for name, grad in parallel.whole_gradients().items()}
    return (loss.detach(), gradients) if rank == 0 else None
