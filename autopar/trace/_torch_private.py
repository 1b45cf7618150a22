"""The only file that touches torch's underscore modules: one-process ranks, and what export hides."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import (
    LocalTensor,
    LocalTensorMode,
    enabled_local_tensor_mode,
    maybe_disable_local_tensor_mode,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import _backward, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

pytree = _pytree
PipelineAction: TypeAlias = schedules._Action
PipelineRuntime: TypeAlias = schedules._PipelineScheduleRuntime


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
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Ranks(LocalTensorMode):
    """torch's mode, short where it can be: an operator of aten that draws nothing runs once per rank, and that is all.

    torch's own keeps the random state and ties the storages of wrappers with every operator, for compilation: more
    work than the operators.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten" or not _only_per_rank(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        named = kwargs or {}
        if not types and args and isinstance(args[0], torch.Tensor):
            return func(*args, **named)  # equal on all ranks
        if LocalTensor not in types:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.sym_size.default:
            return tuple(args[0]._size)
        found = {
            rank: func(*_of_rank(args, rank), **{key: _of_rank(value, rank) for key, value in named.items()})
            for rank in sorted(self.ranks)
        }
        return args[0] if func._schema.is_mutable else _over_ranks(found)


@cache
def _only_per_rank(func: OpOverload) -> bool:
    """Whether an operator draws no random numbers, and writes nothing or its first operand without resizing it."""
    if {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(func.tags):
        return False
    schema = func._schema
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    return not any(written) or (written[0] and sum(written) == 1 and len(schema.returns) == 1)


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, LocalTensor):
        return value._local_tensors[rank]
    return type(value)(_of_rank(v, rank) for v in value) if type(value) in (list, tuple) else value


def _over_ranks(found: dict[int, Any]) -> Any:
    """One result for all ranks: tensors as a rank tensor, anything else where it is equal on all."""
    first = found[0]
    if isinstance(first, torch.Tensor):
        return LocalTensor(found)
    if isinstance(first, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in first):
        return type(first)(_over_ranks({rank: one[i] for rank, one in found.items()}) for i in range(len(first)))
    assert all(one == first for one in found.values()), found
    return first


@contextmanager
def one_process_ranks(world_size: int) -> Iterator[None]:
    """Run all ranks in this process: tensors are `LocalTensor`s that hold one tensor per rank."""
    with fake_world(world_size), _Ranks(world_size):
        yield


def from_ranks(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor that holds the given tensor on each rank."""
    with maybe_disable_local_tensor_mode():
        return LocalTensor({rank: tensor.contiguous().clone() for rank, tensor in enumerate(tensors)})


def to_ranks(tensor: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """The tensor of each rank; a plain tensor is the same on all."""
    if isinstance(tensor, LocalTensor):
        return [tensor._local_tensors[rank] for rank in range(world_size)]
    return [tensor] * world_size


def map_ranks(tensor: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply a function of (rank, that rank's tensor) to each rank's tensor."""
    assert isinstance(tensor, LocalTensor)
    with maybe_disable_local_tensor_mode():
        return LocalTensor({rank: function(rank, part).contiguous() for rank, part in tensor._local_tensors.items()})


def rank_values(world_size: int, function: Callable[[int], int]) -> torch.Tensor:
    """A scalar int64 tensor whose value on each rank is `function(rank)`."""
    with maybe_disable_local_tensor_mode():
        return LocalTensor({rank: torch.tensor(function(rank)) for rank in range(world_size)})


def is_rank_tensor(value: Any) -> bool:
    return isinstance(value, LocalTensor)


def in_one_process() -> bool:
    """Whether all ranks live in this process."""
    return enabled_local_tensor_mode() is not None


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset of a DTensor's local part, FSDP2's strided shards included."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def finish_fsdp_backward(model: nn.Module) -> None:
    """What FSDP2 does after a backward pass, for a module whose gradients were left whole by earlier ones.

    As torch's pipeline stage does for its own FSDP module (torch.distributed.pipelining, `perform_reduce_grad`).
    """
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
    return _backward.stage_backward_input(list(outputs), list(grads), list(inputs), iter(weights))[1]


def backward_of_weights(weights: Sequence[Any], rest: Any) -> None:
    """The second part; gradients are in ``.grad``."""
    _backward.stage_backward_weight(iter(weights), rest)


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
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor first becomes what it sends, which is then seen
        out = func(*args, **(kwargs or {}))
        if func.namespace in self.namespaces:
            names = [argument.name for argument in func._schema.arguments]
            self.seen(func._schema.name, dict(zip(names, args, strict=False)) | (kwargs or {}), out)
        return out


def watch_operators(namespaces: Sequence[str], seen: Callable[[str, dict[str, Any], Any], None]) -> _Watch:
    """A context in which `seen` is told of operators of C++ too, those of the backward pass included."""
    return _Watch(namespaces, seen)


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
