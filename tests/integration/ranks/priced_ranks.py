"""Functions that ranks run in test_priced_is_run: one step under the profiler, and the bytes that a rank holds."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from priced_models import Case, captured
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autopar._torch import private
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.distributed.collective_log import LoggedCollective, kind_of, log_collectives
from autopar.runtime.distributed.mesh import RankMesh
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.model.stage import attribute
from autopar.runtime.profile.trace_step import tracks_of
from autopar.runtime.verify.random_batches import random_batches
from autopar.runtime.verify.verify import this_ranks_part

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
Counts = dict[tuple[str, str], tuple[int, int]]


def measured_step(rank: int, one: Case, plan: Plan) -> tuple[Counts, dict[str, int]]:
    """Calls and operand bytes of every collective of one step, and bytes of what this rank holds, by category."""
    program, source = captured(one.spec, one.layers, plan.degrees.precision)
    model = ParallelModel(program, plan, source, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = random_batches(program, plan.degrees, 2, 0)
    parts = [this_ranks_part(program, batch, plan.degrees, model.rank_mesh.sample_ranks.coordinate) for batch in data]
    model.forward_backward(parts[0])  # opens connections
    optimizer.step()
    optimizer.zero_grad()
    with kept_for_backward(model, program, parts[1]) as most:
        counts = counted(model, model.rank_mesh, parts[1])
    held = [p for stage in model.stage_modules().values() for p in stage.parameters()]
    memory = {
        "parameters": distinct_bytes(local(p) for p in held),
        "gradients": distinct_bytes(local(p.grad) for p in held if p.grad is not None),
        "optimizer": sum(
            local(v).numel() * v.element_size() for state in optimizer.state.values() for v in state.values()
        ),
        "saved": most[0],
    }
    return counts, memory


def counted_flops(rank: int, one: Case, plan: Plan, classes: int) -> tuple[int, int]:
    """FLOP of one step by torch's own count, and the elements of the largest product of `classes` columns."""
    program, source = captured(one.spec, one.layers)
    model = ParallelModel(program, plan, source, torch.device("cpu"))
    (batch,) = random_batches(program, plan.degrees, 1, 0)
    part = this_ranks_part(program, batch, plan.degrees, model.rank_mesh.sample_ranks.coordinate)
    counting = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: sum_of_products})
    with counting as counter, LargestProduct(classes) as largest:
        model.forward_backward(part)
    return counter.get_total_flops(), largest.elements


def sum_of_products(total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    """FLOP of `addmm_`, which torch does not count: of a product that is added to `total` in place."""
    return 2 * left[0] * left[1] * right[1]


class LargestProduct(TorchDispatchMode):
    """The elements of the largest result of a matrix product whose last dimension has `columns` elements."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.elements = columns, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS and found.shape[-1] == self.columns:
            self.elements = max(self.elements, found.numel())
        return found


def counted(model: ParallelModel, mesh: RankMesh, part: Mapping[str, Any]) -> Counts:
    """What a usual step sends, as the runtime writes it down; torch's profiler must have seen the same operators.

    The comparison of weights after the first and the tenth step is left out.
    """
    usual = mock.patch("autopar.runtime.model.running.COMPARED", ())
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with usual, profiler, log_collectives() as sent:
        model.forward_backward(part)
    raw = profiler.profiler.kineto_results.events()  # torch's tree of all events takes longer than the step
    events = [Event(e.name(), e.start_thread_id(), e.start_ns(), e.end_ns()) for e in raw if sends(e.name())]
    profiled = Counter(e.name for e in events if not any(e.is_inside(other) for other in events))
    assert profiled == Counter(s.operator for s in sent), (profiled, Counter(s.operator for s in sent))
    tracks = tracks_of(mesh, {s.group for s in sent if s.group is not None})
    found: Counts = {}
    for s in sent:
        if s.num_ranks > 1:
            key = (tracks[str(s.group)], kind(s))
            calls, size = found.get(key, (0, 0))
            found[key] = (calls + 1, size + s.input_bytes)
    return found


def sends(operator: str) -> bool:
    return operator.startswith(("c10d::", "_c10d_functional::")) and "wait_tensor" not in operator


class Event(NamedTuple):
    """What torch's profiler saw, in nanoseconds."""

    name: str
    thread: int
    start: int
    end: int

    def is_inside(self, other: "Event") -> bool:
        within = other.start <= self.start and self.end <= other.end
        return within and self.thread == other.thread and self is not other


def kind(sent: LoggedCollective) -> str:
    named = kind_of(sent.operator)
    return named.replace("-", "_") if named else "recv" if "recv" in sent.operator else "send"


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each once."""
    return sum({private.storage_id(t): t.untyped_storage().nbytes() for t in list(tensors)}.values())


class Kept:
    """A tensor that autograd keeps, without its graph; counts its storage while any tensor of it is kept."""

    def __init__(
        self, tensor: torch.Tensor, counter: "Counter[int]", sizes: dict[int, int], before_end: Callable[[], None]
    ) -> None:
        self.tensor, self.counter, self.sizes, self.before_end = tensor.detach(), counter, sizes, before_end
        self.at = private.storage_id(tensor)
        counter[self.at] += 1
        sizes[self.at] = tensor.untyped_storage().nbytes()

    def __del__(self) -> None:
        self.before_end()
        self.counter[self.at] -= 1
        if not self.counter[self.at]:
            del self.counter[self.at], self.sizes[self.at]


@contextmanager
def kept_for_backward(
    model: ParallelModel, program: Program, part: Mapping[str, torch.Tensor]
) -> Iterator[Sequence[int]]:
    """The most bytes that autograd keeps at once in here, without parameters, inputs, constants and buffers.

    Copies of master weights in the dtype of computing count as parameters.
    """
    outside = {private.storage_id(t) for t in (*part.values(), *model.base.constants().values())}
    outside |= {private.storage_id(model.buffer(name)) for name in program.updates}
    counter, sizes, most, has_grown = Counter[int](), dict[int, int](), [0], False

    def gathered(module: Any, *_: Any) -> None:
        names = module.names if hasattr(module, "names") else module.shared
        outside.update(private.storage_id(local(getattr(module, attribute(name)))) for name in names)

    def is_copy(at: int) -> bool:
        copies = [stage.copies for stage in model.stage_modules().values()]
        return any(private.storage_id(tensor) == at for copy in copies for tensor in copy.held.values())

    def peak() -> None:
        nonlocal has_grown
        if has_grown:
            has_grown = False
            gc.collect()  # a cycle of objects that nobody refers to keeps nothing for the backward pass
            most[0] = max(most[0], sum(sizes.values()))

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal has_grown
        at = private.storage_id(tensor)
        if at in outside or is_copy(at):
            return tensor
        has_grown = True
        return Kept(tensor, counter, sizes, peak)

    def unpack(kept: Any) -> torch.Tensor:
        found: torch.Tensor = kept.tensor if isinstance(kept, Kept) else kept
        return found

    modules = (*model.segments, *model.stage_modules().values())
    handles = [module.register_forward_pre_hook(gathered) for module in modules]
    gc.disable()  # what it would end is counted until a peak
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield most
    gc.enable()
    for handle in handles:
        handle.remove()
