"""Host memory of a rank: copies to it and from it, and the parameters that an optimizer updates there.

On CUDA the host's tensors are pinned, and copies run on a stream of their own beside the compute stream. On CPU both
places are one memory. Every copy is executed all the same.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._torch import private
from autopar.ir.storage import Storage
from autopar.runtime.parameters.gradients import local_gradient
from autopar.runtime.parameters.user_view import show_parameter


class HostCopies:
    """Copies between a device and its host, and their bytes since the start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_to_host = self.bytes_to_device = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to new host memory. On CUDA it is there after `wait`, and for `to_device` at once."""
        host = self.empty(value)
        self.bytes_to_host += value.numel() * value.element_size()
        with self._beside_computing(value):
            host.copy_(value, non_blocking=True)
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of the host to new device memory. The compute stream waits for it."""
        value = torch.empty_like(host, device=self.device, pin_memory=False)
        self.fill(value, host)
        return value

    def fill(self, value: torch.Tensor, host: torch.Tensor) -> None:
        """Copy a tensor of the host into a tensor of the device."""
        self.bytes_to_device += value.numel() * value.element_size()
        with self._beside_computing(value):
            value.copy_(host, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory without values."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self._stream is not None)

    def wait(self) -> None:
        """Wait until the host has everything that was copied to it."""
        if self._stream is not None:
            self._stream.synchronize()

    def _beside_computing(self, value: torch.Tensor) -> AbstractContextManager[Any]:
        """The stream of copies, behind what the compute stream has started. It keeps the tensor's memory."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        value.record_stream(self._stream)
        return torch.cuda.stream(self._stream)


class HostParameters:
    """The parameters on the host that the user's optimizer updates, of the `computed` ones that need gradients."""

    def __init__(
        self, computed: Mapping[str, nn.Parameter], placements: Mapping[str, Storage], copies: HostCopies
    ) -> None:
        self._copies, self._computed = copies, dict(computed)
        self._held = {name: self._on_host(p) for name, p in computed.items() if p.requires_grad}
        self._sent = {name: private.version_of(held) for name, held in self._held.items()}
        copies.wait()
        for name, parameter in self._held.items():
            show_parameter(parameter, name, placements[name])

    def _on_host(self, parameter: nn.Parameter) -> nn.Parameter:
        host = self._copies.to_host(private.local_part(parameter.detach()))
        whole = private.with_local_part(parameter, host) if isinstance(parameter, DTensor) else host
        return nn.Parameter(whole, requires_grad=True)

    def of(self, name: str, computed: nn.Parameter) -> nn.Parameter:
        """The parameter that the user holds."""
        return self._held.get(name, computed)

    @torch.no_grad()
    def send_values(self) -> None:
        """Give the device the values written since. Unchanged weights keep their version, which autograd compares."""
        for name, held in self._held.items():
            computed, version = private.local_part(self._computed[name]), private.version_of(held)
            same = private.keeping_version(computed) if version == self._sent[name] else nullcontext()
            with same:
                self._copies.fill(computed, private.local_part(held))
            self._sent[name] = version
            computed = self._computed[name]
            if computed.requires_grad != held.requires_grad:
                computed.requires_grad_(held.requires_grad)

    @torch.no_grad()
    def take_gradients(self, names: Collection[str] | None = None) -> None:
        """Move gradients to the host, all or those of some parameters, and add them to what is there."""
        moved: list[tuple[nn.Parameter, torch.Tensor]] = []
        for name, held in self._held.items():
            if names is not None and name not in names:
                continue
            grad = local_gradient(self._computed[name])
            if grad is not None:
                moved.append((held, self._copies.to_host(grad)))
                self._computed[name].grad = None
        self._copies.wait()
        for held, host in moved:
            earlier = local_gradient(held)
            if earlier is not None:
                earlier.add_(host)
            else:
                held.grad = private.with_local_part(held, host) if isinstance(held, DTensor) else host
