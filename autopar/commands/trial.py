"""One trial of a plan on the ranks of a world of its own: build the model once, then run single steps when asked.

Ranks get the captured program, and need no model. Weights are random and small, because a step takes the same time
with any. Buffers have the model's values, because masks and tables decide what is computed.
"""

import importlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from autopar.capture.record.file import from_bytes
from autopar.capture.record.read import BadRecord
from autopar.commands.given import given_by_script, is_script
from autopar.cost_model.interval import usable_bytes
from autopar.errors import InputError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.models.load import is_factory, resolve_model
from autopar.runtime.distributed.launch import device_of_rank
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.model.optimizers import optimizers_of
from autopar.runtime.recording.run import peak_bytes
from autopar.runtime.verify.random_batches import random_batches
from autopar.runtime.verify.reference import constants_of, scaler_of, step_with
from autopar.runtime.verify.verify import this_ranks_part
from autopar.words.numbers import readable_bytes

SCALE = 0.02  # of random weights
_PATTERN = 2**20  # random numbers that fill larger tensors again and again
_LEARNING_RATE = 1e-5
_CPU = torch.device("cpu")
MEMORY_WAIT_S, MEMORY_POLL_S = 10.0, 0.05
CROWDED = "of this GPU's memory are free"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """What every rank of a trial needs. `origin` is the module or factory that may register operators."""

    plan: Plan
    program: bytes
    buffers: Mapping[str, torch.Tensor]
    given: Mapping[str, torch.Tensor]  # values of inputs that decide what is computed
    origin: str
    device_type: str
    predicted_bytes: float  # of the fullest rank, predicted
    seed: int = 0


class Trainer:
    """A plan that is being trained on this rank."""

    def __init__(self, job: TrialJob) -> None:
        _die_before_the_controller()
        program, plan = _program_of(job), job.plan
        self.device = device_of_rank()
        if self.device.type == "cuda":
            wait_for_memory(job.predicted_bytes, lambda: torch.cuda.mem_get_info(self.device))
        self._base_bytes = peak_bytes(_CPU)
        source = _Weights(program, job)
        self.model = ParallelModel(program, plan, source, self.device, seed=job.seed, buffers=source)
        self.optimizers = optimizers_of(self.model, plan.degrees.optimizer, _LEARNING_RATE)
        self.scaler = scaler_of(plan.degrees)
        constants = constants_of(program, source)
        (batch,) = random_batches(program, plan.degrees, 1, job.seed, job.given, constants)
        part = this_ranks_part(program, batch, plan.degrees, self.model.rank_mesh.sample_ranks.coordinate)
        self.batch = {name: value.to(self.device) for name, value in part.items()}

    def step(self) -> tuple[float, int]:
        """Run one step of all ranks, from a barrier to the end of the slowest rank. Collective.

        Returns the seconds of the slowest rank, and this rank's peak memory: of torch's allocator on a GPU, and what
        the process grew by on a CPU.
        """
        dist.barrier(device_ids=None if self.device.type == "cpu" else [self.device.index])
        started = time.perf_counter()
        self.model.forward_backward(self.batch, scaler=self.scaler)
        step_with(self.scaler, *self.optimizers)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spent = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=self.device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if self.device.type == "cuda":
            return float(spent), int(torch.cuda.max_memory_reserved(self.device))
        return float(spent), peak_bytes(_CPU) - self._base_bytes


class _Weights:
    """A function from a parameter's or buffer's name to its whole tensor."""

    def __init__(self, program: Program, job: TrialJob) -> None:
        self._infos = {info.whole_name: info for info in program.every_parameter.values()}
        self._buffers = job.buffers
        self._stored = None if job.plan.degrees.precision is None else torch.float32  # beside 16-bit copies
        generator = torch.Generator().manual_seed(job.seed)
        self._pattern = torch.randn(_PATTERN, generator=generator) * SCALE

    def __call__(self, name: str) -> torch.Tensor:
        if name in self._buffers:
            return self._buffers[name]
        info = self._infos[name]
        shape = info.shape if info.part is None else info.part.shape
        count = prod(shape)
        repeated = self._pattern.repeat(-(-count // _PATTERN))[:count]
        return repeated.reshape(shape).to(self._stored if self._stored and info.dtype.is_floating_point else info.dtype)


# What this process trains: a rank is a process of one world, and a world trains one plan.
_TRAINED: list[Trainer] = []


def build(rank: int, job: TrialJob) -> None:
    """Build the plan of this world on one rank. Collective."""
    _TRAINED.append(Trainer(job))


def step(rank: int) -> tuple[float, int]:
    """Run one step of the plan that was built. Collective."""
    return _TRAINED[0].step()


def wait_for_memory(predicted_bytes: float, memory: Callable[[], tuple[int, int]]) -> None:
    """Wait until the memory of ranks that have ended is free again: a GPU frees it after their end."""
    until = time.monotonic() + MEMORY_WAIT_S
    while (free := memory()[0]) < predicted_bytes and time.monotonic() < until:
        time.sleep(MEMORY_POLL_S)
    total = memory()[1]
    if free < predicted_bytes <= usable_bytes(total):
        raise InputError(
            f"{readable_bytes(free)} of {readable_bytes(total)} {CROWDED}, and the plan is predicted to need "
            f"{readable_bytes(predicted_bytes)}: end the processes that hold the rest"
        )


def _die_before_the_controller() -> None:
    """Without memory Linux kills the process of the highest score: let it be a rank, not the controller."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("800")


def _program_of(job: TrialJob) -> Program:
    """The program, whose operators the origin may have to register. A script runs only if it must."""
    if not is_script(job.origin):
        _import_origin(job.origin)
        return from_bytes(job.program)
    try:
        return from_bytes(job.program)
    except BadRecord:
        given_by_script(job.origin)
        return from_bytes(job.program)


def _import_origin(origin: str) -> None:
    """Import the module, or run the factory, that may register operators of the program."""
    if is_factory(origin):
        resolve_model(origin)
    elif origin:
        with suppress(ImportError):  # such as __main__ of a notebook: then its program has no operators of its own
            importlib.import_module(origin)
