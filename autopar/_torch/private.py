"""All other uses of PyTorch's private (underscore) modules: `autopar._torch.exports` has its own.

Functions import slow modules that planning does not need: `torch.distributed.tensor`, its one-process ranks, FSDP and
pipelining. These modules load symbolic shapes and the compiler. Their import takes as long as the import of torch.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from autopar._torch.names import private_names

with private_names():
    from torch._C._distributed_c10d import _resolve_process_group
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.nn.modules import module as _modules
    from torch.nn.modules.module import _IncompatibleKeys
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch.distributed.pipelining import schedules

    PipelineAction: TypeAlias = schedules._Action
    PipelineRuntime: TypeAlias = schedules._PipelineScheduleRuntime

pytree = _pytree
IncompatibleKeys = _IncompatibleKeys


def overloads_of(value: Any) -> dict[str, OpOverload]:
    """The overloads of an operator, an overload or a custom operator, by name. Empty for another value."""
    op = getattr(value, "_opoverload", value)
    if isinstance(op, OpOverload):
        return {str(op): op}
    if isinstance(op, OpOverloadPacket):
        return {f"{op}.{name}": getattr(op, name) for name in op.overloads()}
    return {}


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """A process group of `world_size` ranks that sends nothing. This process is rank 0."""
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
    """Run all ranks in this process. Each tensor is a `LocalTensor`, which holds one tensor per rank."""
    from torch.distributed._local_tensor import LocalTensorMode

    with fake_world(world_size), LocalTensorMode(world_size):
        yield


def rank_tensor(num_ranks: int, part: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """One tensor that holds `part(rank)` on each rank."""
    from torch.distributed._local_tensor import LocalTensor

    with without_ranks():
        return LocalTensor({rank: part(rank).contiguous() for rank in range(num_ranks)})


def from_ranks(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor that holds the given tensor on each rank."""
    return rank_tensor(len(tensors), lambda rank: tensors[rank].contiguous().clone())


def to_ranks(tensor: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """The tensor of each rank. A plain tensor is the same on all ranks."""
    if is_rank_tensor(tensor):
        parts: Any = tensor
        return [parts._local_tensors[rank] for rank in range(world_size)]
    return [tensor] * world_size


def map_ranks(tensor: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply a function of (rank, that rank's tensor) to each rank's tensor."""
    parts: Any = tensor
    held = parts._local_tensors
    return rank_tensor(len(held), lambda rank: function(rank, held[rank]))


@contextmanager
def without_ranks() -> Iterator[None]:
    """Compute on plain tensors, also where all ranks live in this process."""
    if not in_one_process():
        yield
        return
    from torch.distributed._local_tensor import maybe_disable_local_tensor_mode

    with maybe_disable_local_tensor_mode():
        yield


def is_rank_tensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed._local_tensor")  # before this import there are no rank tensors
    return module is not None and isinstance(value, module.LocalTensor)


def causal_to_the_end(num_queries: int, num_keys: int) -> torch.Tensor:
    """The mask of causal attention of the last queries, as an object. torch cannot make it under a dispatch mode."""
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler

    with _disable_current_modes():
        return causal_lower_right(num_queries, num_keys)


def in_one_process() -> bool:
    """Whether all ranks live in this process."""
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and module.enabled_local_tensor_mode() is not None


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and global offset of a DTensor's local part. FSDP2's strided shards are supported."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def finish_fsdp_backward(model: nn.Module) -> None:
    """Reduce the gradients of an FSDP2 module whose earlier backward passes left them unreduced."""
    from torch.distributed.fsdp import FSDPModule

    roots = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not roots:
        return
    state = roots[0]._get_fsdp_state()
    for s in state._state_ctx.all_states:
        for group in s._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[Any],
) -> Any:
    """Run the first part of a backward pass, the gradients of the inputs, as PyTorch's pipeline stages do."""
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input(list(outputs), list(grads), list(inputs), iter(weights))[1]


def backward_of_weights(weights: Sequence[Any], rest: Any) -> None:
    """Run the second part of a backward pass: the gradients of the weights, in ``.grad``."""
    from torch.distributed.pipelining import _backward

    _backward.stage_backward_weight(iter(weights), rest)


def wanted_gradients(ctx: Any) -> list[bool]:
    """Whether the backward pass that runs, which may be one part of two, wants the gradient of each argument."""
    if torch.compiler.is_compiling():
        return list(ctx.needs_input_grad)
    nodes = (node for node, _ in ctx.next_functions if node is not None)
    return [needs and _will_run(next(nodes)) for needs in ctx.needs_input_grad]


def _will_run(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd raises for leaves whose gradients are wanted, and these leaves will run
        return True


def pipeline_action(text: str) -> "PipelineAction | None":
    """An action of PyTorch's pipeline schedules from its printed form, such as ``0F1``."""
    from torch.distributed.pipelining import schedules

    action: PipelineAction | None = schedules._Action.from_str(text)
    return action


def pipeline_runtime(
    stages: list[Any], num_micro_batches: int, loss_fn: Callable[..., Any] | None
) -> "PipelineRuntime":
    """The runner of action lists on pipeline stages. It sums gradients over micro-batches and does not scale them."""
    from torch.distributed.pipelining import schedules

    return schedules._PipelineScheduleRuntime(stages, num_micro_batches, loss_fn=loss_fn, scale_grads=False)


def is_profiling() -> bool:
    """Whether a PyTorch profiler records this thread. The check costs less than an unrecorded range."""
    return bool(torch._C._autograd._profiler_enabled())


def storage_id(tensor: torch.Tensor) -> int:
    """A number that is unique among the storages of all live tensors."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def storage_reference(tensor: torch.Tensor) -> Any:
    """A reference that frees nothing later, but keeps the number of the tensor's storage from being used again."""
    return StorageWeakRef(tensor.untyped_storage())


def saved_tensor_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Pack and unpack of the innermost `saved_tensors_hooks`. Without hooks a tensor is kept without its graph."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks or (torch.Tensor.detach, lambda kept: kept)


class LiveStorages(TorchDispatchMode):
    """Counts bytes of live storages made in this context but on meta, and their peak; add to `more_bytes` at will."""

    def __init__(self, outside: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = {storage_id(value) for value in outside if isinstance(value, torch.Tensor)}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = self.more_bytes = self.peak_with_more_bytes = 0

    def bytes(self) -> int:
        """The bytes of the storages that are live now."""
        self._live = {at: held for at, held in self._live.items() if not held[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        grows = False
        for value in (v for v in pytree.tree_leaves(out) if isinstance(v, torch.Tensor) and v.device.type != "meta"):
            at, storage = storage_id(value), value.untyped_storage()
            if at not in self._outside and (at not in self._live or self._live[at][0].expired()):
                self._live[at], grows = (StorageWeakRef(storage), storage.nbytes()), True
        if grows:
            live_bytes = self.bytes()
            self.peak_bytes = max(self.peak_bytes, live_bytes)
            self.peak_with_more_bytes = max(self.peak_with_more_bytes, live_bytes + self.more_bytes)
        return out


class _Watch(TorchDispatchMode):
    """Reports every operator call in some namespaces: the operator's name, its arguments by name, and the result."""

    def __init__(self, namespaces: Sequence[str], seen: Callable[[str, dict[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.namespaces, self.seen = frozenset(namespaces), seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        distributed = sys.modules.get("torch.distributed.tensor")  # before this import there are no DTensors
        if distributed is not None and any(issubclass(kind, distributed.DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operators on local tensors, and these calls are reported
        out = func(*args, **(kwargs or {}))
        if func.namespace in self.namespaces:
            names = [argument.name for argument in func._schema.arguments]
            self.seen(func._schema.name, dict(zip(names, args, strict=False)) | (kwargs or {}), out)
        return out


def watch_operators(namespaces: Sequence[str], seen: Callable[[str, dict[str, Any], Any], None]) -> _Watch:
    """A context that calls `seen` for every operator call, including calls from C++ and from the backward pass."""
    return _Watch(namespaces, seen)


def takes_device(operator: Any) -> bool:
    """Whether an operator has an argument `device`."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and any(argument.name == "device" for argument in schema.arguments)


def fake_tensors() -> AbstractContextManager[Any]:
    """A context whose tensors have shapes, strides, dtypes, storages and autograd, but no elements."""
    return FakeTensorMode()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory and nothing else: no parameter, no DTensor, no sparse tensor."""
    return type(tensor) in (torch.Tensor, FakeTensor) and tensor.layout is torch.strided


def keeping_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """A context in which writing to a tensor does not count as a change of values that autograd has saved."""
    context: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    return context


def version_of(tensor: torch.Tensor) -> int:
    """The number of changes in place that autograd knows of; of a DTensor those of its local part."""
    return int(getattr(tensor, "_local_tensor", tensor)._version)


def hook_after_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call a hook when autograd, or FSDP2, has added to a parameter's gradient, whatever class the parameter has."""
    with without_torch_function():
        torch.Tensor.register_post_accumulate_grad_hook(parameter, hook)  # type: ignore[no-untyped-call]


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into tensors of the same shapes, in one call."""
    torch._foreach_copy_(targets, sources)


@contextmanager
def outside_of_workers() -> Iterator[None]:
    """`torch.utils.data.get_worker_info()` is None, as in a process that is no worker of a loader."""
    from torch.utils.data._utils import worker

    with patch.object(worker, "_worker_info", None):
        yield


def unscale_and_check(gradients: list[torch.Tensor], flag: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply gradients by a number in place. `found` becomes 1 if an element is NaN or infinite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse_scale)


def group_name_of(arguments: dict[str, Any]) -> str | None:
    """The name of the process group among the arguments of a collective operator."""
    if "group_name" in arguments:
        return str(arguments["group_name"])
    if "process_group" in arguments:
        return str(dist.ProcessGroup.unbox(arguments["process_group"]).group_name)
    return None


def size_of_group(name: str) -> int:
    """The number of ranks in the process group with this name."""
    return int(_resolve_process_group(name).size())  # type: ignore[arg-type]


def group_timeout() -> timedelta:
    """The timeout of operations of the world's process group."""
    group, device = dist.group.WORLD, torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    assert group is not None
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def share_gloo_device() -> None:
    """Let all gloo groups of this process use one device: each device has a thread that polls 100 times a second."""
    from torch._C._distributed_c10d import ProcessGroupGloo
    from torch.distributed import distributed_c10d

    gloo: Any = ProcessGroupGloo
    device = gloo.create_default_device()

    class OneDeviceGloo(ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    vars(distributed_c10d)["ProcessGroupGloo"] = OneDeviceGloo


def with_timeout(backend: str, timeout: timedelta) -> tuple[str, Any]:
    """A backend and its options, for a process group with this timeout: a `DeviceMesh` takes 30 minutes on gloo."""
    options: Any = dist.ProcessGroupNCCL.Options() if backend == "nccl" else dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    return backend, options


def plain_dtensor(tensor: Any) -> Any:
    """A DTensor with the memory and layout of an instance of a subclass of DTensor."""
    from torch.distributed.tensor import DTensor

    return DTensor(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)


def with_local_part(like: Any, local: torch.Tensor) -> Any:
    """A DTensor with the layout of another one, and this rank's part of its values. It takes no part in autograd."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = like._spec
    if local.dtype != spec.tensor_meta.dtype:
        meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def local_part(tensor: Any) -> torch.Tensor:
    """The memory of this rank behind a DTensor. Another tensor is returned."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def tensor_without_memory(kind: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass that has a shape, a dtype and a device, but no values of its own."""
    return torch.Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device)


def same_spec(one: Any, other: Any) -> bool:
    """Whether two DTensors have the same global shape, as they are stored, and the same placements on one mesh."""
    return one._spec is other._spec or bool(
        one._spec.shape == other._spec.shape
        and one._spec.placements == other._spec.placements
        and one._spec.mesh == other._spec.mesh
    )


def shares_memory(one: Any, other: Any) -> bool:
    """Whether two tensors lie in the same memory. Of DTensors the local parts count."""
    return storage_id(getattr(one, "_local_tensor", one)) == storage_id(getattr(other, "_local_tensor", other))


def convert_tensors(model: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A module with every parameter and buffer replaced by ``function(tensor)``, as ``module.to`` does it."""
    converted: nn.Module = model._apply(function)
    return converted


def without_torch_function() -> AbstractContextManager[Any]:
    """A context in which functions of torch do not call `__torch_function__` of tensor subclasses."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


def backward_hooked(model: nn.Module) -> dict[str, list[str]]:
    """The names of the modules with backward hooks, and of the parameters with hooks on their gradients."""
    modules = [name for name, module in model.named_modules() if module._backward_hooks or module._backward_pre_hooks]
    if _modules._global_backward_hooks or _modules._global_backward_pre_hooks:
        modules.insert(0, "(every module: torch.nn.modules.module)")
    parameters = [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    return {"module": modules, "parameter": parameters}


@contextmanager
def without_step_hooks(optimizer: Any) -> Iterator[None]:
    """A context in which the step of an optimizer calls no hooks of its users."""
    with ExitStack() as stack:
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if hasattr(optimizer, name):
                stack.enter_context(patch.object(optimizer, name, type(getattr(optimizer, name))()))
        yield


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that `torch.compile`, `DistributedDataParallel` or `DataParallel` wrapped. Another one is returned."""
    is_compiled = type(model).__module__ == "torch._dynamo.eval_frame"
    is_wrapped = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    wrapped = model._modules.get("_orig_mod" if is_compiled else "module") if is_compiled or is_wrapped else None
    return model if wrapped is None else unwrapped(wrapped)
