"""With `ranks` the only file that touches torch's underscore modules: ranks, and what export hides.

What is slow to import, and not needed to plan, is imported where it is used: `torch.distributed.tensor`, its
one-process ranks, FSDP and pipelining load symbolic shapes and the compiler, and take as long as torch itself.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import config
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.pipelining import schedules

    PipelineAction: TypeAlias = schedules._Action
    PipelineRuntime: TypeAlias = schedules._PipelineScheduleRuntime

pytree = _pytree


def operator_parts(value: Any) -> tuple[str, str, str] | None:
    """Namespace, name and overload of an operator, by which `torch.ops` has it; None of anything else."""
    return (value.namespace, value._opname, value._overloadname) if isinstance(value, OpOverload) else None


def overloads_of(value: Any) -> dict[str, OpOverload]:
    """The overloads by name of an operator, an overload or what `torch.library.custom_op` returns; none of others."""
    found = getattr(value, "_opoverload", value)
    if isinstance(found, OpOverload):
        return {str(found): found}
    if isinstance(found, OpOverloadPacket):
        return {f"{found}.{name}": getattr(found, name) for name in found.overloads()}
    return {}


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """A process group of `world_size` ranks of which this process is rank 0 and nothing is sent."""
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; a fake world needs a process without one")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def one_process_ranks(world_size: int) -> Iterator[None]:
    """Run all ranks in this process: tensors are `LocalTensor`s that hold one tensor per rank."""
    from autopar._torch.ranks import Ranks

    with fake_world(world_size), Ranks(world_size):
        yield


def from_ranks(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor that holds the given tensor on each rank."""
    from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode

    with maybe_disable_local_tensor_mode():
        return LocalTensor({rank: tensor.contiguous().clone() for rank, tensor in enumerate(tensors)})


def to_ranks(tensor: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """The tensor of each rank; a plain tensor is the same on all."""
    if is_rank_tensor(tensor):
        parts: Any = tensor
        return [parts._local_tensors[rank] for rank in range(world_size)]
    return [tensor] * world_size


def map_ranks(tensor: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply a function of (rank, that rank's tensor) to each rank's tensor."""
    from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode

    assert isinstance(tensor, LocalTensor)
    with maybe_disable_local_tensor_mode():
        return LocalTensor({rank: function(rank, part).contiguous() for rank, part in tensor._local_tensors.items()})


def rank_values(world_size: int, function: Callable[[int], int]) -> torch.Tensor:
    """A scalar int64 tensor whose value on each rank is `function(rank)`."""
    from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode

    with maybe_disable_local_tensor_mode():
        return LocalTensor({rank: torch.tensor(function(rank)) for rank in range(world_size)})


def is_rank_tensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed._local_tensor")  # before it is loaded there is no such tensor
    return module is not None and isinstance(value, module.LocalTensor)


def in_one_process() -> bool:
    """Whether all ranks live in this process."""
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and module.enabled_local_tensor_mode() is not None


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset of a DTensor's local part, FSDP2's strided shards included."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def finish_fsdp_backward(model: nn.Module) -> None:
    """What FSDP2 does after a backward pass, for a module whose gradients were left whole by earlier ones.

    As torch's pipeline stage does for its own FSDP module (torch.distributed.pipelining, `perform_reduce_grad`).
    """
    from torch.distributed.fsdp import FSDPModule

    roots = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not roots:
        return
    state = roots[0]._get_fsdp_state()
    for one in state._state_ctx.all_states:
        for group in one._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[Any],
) -> Any:
    """The first part of a backward pass as torch's pipeline stages run it; what `backward_of_weights` takes."""
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input(list(outputs), list(grads), list(inputs), iter(weights))[1]


def backward_of_weights(weights: Sequence[Any], rest: Any) -> None:
    """The second part; gradients are in ``.grad``."""
    from torch.distributed.pipelining import _backward

    _backward.stage_backward_weight(iter(weights), rest)


def wanted_gradients(ctx: Any) -> list[bool]:
    """Which arguments' gradients a backward pass wants of an `autograd.Function`, as `ctx.needs_input_grad` has it for
    a whole one. A pass that runs in parts wants some in each, and runs the function in both."""
    if torch.compiler.is_compiling():
        return list(ctx.needs_input_grad)
    nodes = (node for node, _ in ctx.next_functions if node is not None)
    return [needs and _will_run(next(nodes)) for needs in ctx.needs_input_grad]


def _will_run(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # refused for leaves whose gradients are asked for, which therefore will run
        return True


@contextmanager
def quick_export() -> Iterator[None]:
    """Export in half the time: without what only debugging reads, and without collecting garbage in between.

    A stack trace per node is not recorded, and code of graph modules is not generated before it is run, which it never
    is. Graphs refer to each other in many circles, so that collecting walks all of them again and again.
    """
    was_enabled, had_traces = gc.isenabled(), config.do_not_emit_stack_traces
    gc.disable()
    config.do_not_emit_stack_traces = True
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        config.do_not_emit_stack_traces = had_traces
        if was_enabled:
            gc.enable()


@contextmanager
def as_exported() -> Iterator[None]:
    """What is called in this context is told that it is being exported."""
    from torch._export.utils import _compiling_state_context

    with _compiling_state_context():
        yield


def pipeline_action(text: str) -> "PipelineAction | None":
    """An action of torch's pipeline schedules, as it prints: ``0F1``."""
    from torch.distributed.pipelining import schedules

    action: PipelineAction | None = schedules._Action.from_str(text)
    return action


def pipeline_runtime(
    stages: list[Any], num_micro_batches: int, loss_fn: Callable[..., Any] | None
) -> "PipelineRuntime":
    """What runs lists of actions on stages; gradients are left as they are summed."""
    from torch.distributed.pipelining import schedules

    return schedules._PipelineScheduleRuntime(stages, num_micro_batches, loss_fn=loss_fn, scale_grads=False)


def is_profiling() -> bool:
    """Whether a profiler of torch records this thread; costs less than a range that nobody records."""
    return bool(torch._C._autograd._profiler_enabled())


def storage_id(tensor: torch.Tensor) -> int:
    """What tells the storage of a tensor from all others that live."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


class LiveStorages(TorchDispatchMode):
    """Bytes of the storages that operators make in this context and that live, and the most that ever lived.

    Storages of the given tensors, which were made before, are left out.
    """

    def __init__(self, outside: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = {storage_id(value) for value in outside if isinstance(value, torch.Tensor)}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def bytes(self) -> int:
        """Of what lives now."""
        self._live = {at: held for at, held in self._live.items() if not held[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        grows = False
        for value in pytree.tree_leaves(out):
            if isinstance(value, torch.Tensor) and storage_id(value) not in self._outside:
                at, storage = storage_id(value), value.untyped_storage()
                if at not in self._live or self._live[at][0].expired():
                    self._live[at], grows = (StorageWeakRef(storage), storage.nbytes()), True
        if grows:
            self.peak_bytes = max(self.peak_bytes, self.bytes())
        return out


def live_storages(outside: Sequence[Any]) -> LiveStorages:
    """A context that counts what operators make inside it, but for the storages of some tensors."""
    return LiveStorages(outside)


class _Watch(TorchDispatchMode):
    """Reports every call of an operator of some namespaces: the operator's name, its arguments by name, the result."""

    def __init__(self, namespaces: Sequence[str], seen: Callable[[str, dict[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.namespaces, self.seen = frozenset(namespaces), seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        distributed = sys.modules.get("torch.distributed.tensor")  # before it is loaded there is no DTensor
        if distributed is not None and any(issubclass(kind, distributed.DTensor) for kind in types):
            return NotImplemented  # a DTensor first becomes what it sends, which is then seen
        out = func(*args, **(kwargs or {}))
        if func.namespace in self.namespaces:
            names = [argument.name for argument in func._schema.arguments]
            self.seen(func._schema.name, dict(zip(names, args, strict=False)) | (kwargs or {}), out)
        return out


def watch_operators(namespaces: Sequence[str], seen: Callable[[str, dict[str, Any], Any], None]) -> _Watch:
    """A context in which `seen` is told of operators of C++ too, those of the backward pass included."""
    return _Watch(namespaces, seen)


def takes_device(operator: Any) -> bool:
    """Whether an operator has an argument `device`."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and any(argument.name == "device" for argument in schema.arguments)


def fake_tensors() -> AbstractContextManager[Any]:
    """A context of tensors with shapes, strides, dtypes, storages and autograd, but without numbers."""
    return FakeTensorMode()


def group_name_of(arguments: dict[str, Any]) -> str | None:
    """The name of the process group among the arguments of a collective operator."""
    if "group_name" in arguments:
        return str(arguments["group_name"])
    if "process_group" in arguments:
        return str(dist.ProcessGroup.unbox(arguments["process_group"]).group_name)
    return None


def size_of_group(name: str) -> int:
    """How many ranks the process group of a name has."""
    return int(_resolve_process_group(name).size())  # type: ignore[arg-type]


def group_timeout() -> timedelta:
    """How long operations of the world's process group may wait."""
    group, device = dist.group.WORLD, torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    assert group is not None
    found: timedelta = group._get_backend(device).options._timeout
    return found


def with_timeout(backend: str, timeout: timedelta) -> tuple[str, Any]:
    """A backend and its options, for a process group whose operations may wait so long.

    torch gives the groups of a `DeviceMesh` 30 minutes on gloo, whatever the world's timeout is.
    """
    options: Any = dist.ProcessGroupNCCL.Options() if backend == "nccl" else dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    return backend, options
