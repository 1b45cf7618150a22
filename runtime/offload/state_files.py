"""The state of an optimizer in a file instead of anonymous memory: `torch.UntypedStorage.from_file`, mapped and shared.

The kernel writes pages of such a file to the disk and takes them from memory when memory is short. So the host's memory
bounds one parameter's state, not the state of the model. Values are the same bits, because the optimizer computes with
the mapped tensors as with any others.

The file has all its disk space before training starts, and no name: it is unlinked once it is mapped. So a full disk is
an error at once, and nothing is left behind when a job ends or dies.
"""

import os
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar._torch import private
from autopar.errors import InputError, RuntimeInputError
from autopar.runtime.parameters.shown_tensor import parts_of
from autopar.words.numbers import readable_bytes

SMALLEST_BYTES = 4096  # a page; smaller tensors, such as numbers of steps, stay in memory
_ALIGNED = 64


class _Area:
    """Reserved bytes of files in a folder, given out once."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder, self._used = folder, 0
        self._storage = mapped_file(folder, max(num_bytes, SMALLEST_BYTES))
        self._owned = {self._storage.data_ptr()}

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._owned

    @torch.no_grad()
    def take_over(self, tensor: torch.Tensor) -> None:
        """Move the values of a tensor, which becomes a view of a file."""
        size = tensor.numel() * tensor.element_size()
        begin = -(-self._used // _ALIGNED) * _ALIGNED
        if begin + size > self._storage.nbytes():
            self._storage, begin = mapped_file(self.folder, size), 0
            self._owned.add(self._storage.data_ptr())
        self._used = begin + size
        place = torch.empty(0, dtype=tensor.dtype)
        place.set_(self._storage, begin // tensor.element_size(), tensor.shape, tensor.contiguous().stride())
        place.copy_(tensor)
        tensor.set_(self._storage, place.storage_offset(), place.shape, place.stride())


class _State(dict[str, Any]):
    """The state of one parameter. Its large tensors are views of a file."""

    def __init__(self, area: _Area, values: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._area = area
        for key, value in (values or {}).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        for tensor in local_tensors(value):
            if tensor.numel() * tensor.element_size() >= SMALLEST_BYTES and not self._area.owns(tensor):
                self._area.take_over(tensor)
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy, or what is saved, is a plain dict


class _States(defaultdict[Any, Any]):
    """The state of every parameter."""

    def __init__(self, area: _Area, values: Mapping[Any, Any]) -> None:
        super().__init__(dict)
        self._area = area
        for parameter, state in values.items():
            self[parameter] = _State(area, state)

    def __missing__(self, parameter: Any) -> _State:
        state = self[parameter] = _State(self._area)
        return state


@torch.no_grad()
def keep_state_in_files(optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> int:
    """Keep an optimizer's state in a file of a folder, from the next step on; returns the reserved bytes."""
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"no such folder: {path}; make it on the disk that shall hold the optimizer's state")
    on_device = next((p for group in optimizer.param_groups for p in group["params"] if p.device.type != "cpu"), None)
    if on_device is not None:
        raise RuntimeInputError(
            f"the optimizer updates parameters on {on_device.device}, so its state lies there; keep it on the host "
            "with a plan of offload optimizer or parameters"
        )
    area = _Area(path, needed_bytes(optimizer))
    optimizer.state = _States(area, optimizer.state)

    def loaded(opt: torch.optim.Optimizer) -> None:
        opt.state = _States(_Area(path, needed_bytes(opt)), opt.state)  # the old file may hold what was loaded

    optimizer.register_load_state_dict_post_hook(loaded)
    return area._storage.nbytes()


def needed_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state on this rank: of the state it has, else of one step with a gradient of zeros."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            state = optimizer.state.get(parameter) or _state_of_zeros(optimizer, group, parameter)
            sizes = [t.numel() * t.element_size() for value in state.values() for t in local_tensors(value)]
            total += sum(size + _ALIGNED for size in sizes if size >= SMALLEST_BYTES)
    return total


def _state_of_zeros(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    """The state of a parameter after a step of a copy of the optimizer, by key and number of the part."""
    state: dict[str, Any] = {}
    for k, tensor in enumerate(local_tensors(parameter)):
        alone = nn.Parameter(torch.zeros_like(tensor))
        alone.grad = torch.zeros_like(tensor)
        probe = copy(optimizer)
        probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        probe.param_groups = [{**group, "params": [alone]}]
        probe.state = defaultdict(dict)
        type(optimizer).step(probe)
        state |= {f"{key}.{k}": value for key, value in probe.state[alone].items()}
    return state


def mapped_file(folder: Path, num_bytes: int) -> torch.UntypedStorage:
    """Shared memory of a file with this many bytes on the disk. The file has no name any more."""
    try:
        handle, name = tempfile.mkstemp(prefix="autopar-state-", dir=folder)
        try:
            os.posix_fallocate(handle, 0, num_bytes)
            untyped: Any = torch.UntypedStorage.from_file(name, True, num_bytes)
            storage: torch.UntypedStorage = untyped
            return storage
        finally:
            os.close(handle)
            os.unlink(name)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{folder} has no room for {readable_bytes(num_bytes)} of this rank's optimizer state: {error}; free space "
            "there, or name a folder on another disk"
        ) from None


def local_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that hold this rank's part of a value; none if it is no tensor."""
    if not isinstance(value, torch.Tensor):
        return []
    return [private.local_part(part) for part in parts_of(value)]
