"""`GradScaler`: torch's loss scaling, with one decision of all ranks about an overflow.

A rank sees the gradients of its own shards and pipeline stages. torch's `GradScaler` looks at these gradients alone, so
one rank would skip a step that another rank takes. Here the flag of an overflow is the maximum over all ranks, whatever
mesh dimension they lie on. All ranks skip the step, and all lower their scale once.

Ranks with different settings would sum gradients of different scales. `forward_backward` compares the settings before
it sends anything else (`PreflightCheck`). In a loop of the user, `unscale_` compares them together with the flag.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import private
from autopar.errors import RuntimeInputError
from autopar.runtime.codegen.randomness import seed_from
from autopar.runtime.parameters.gradients import local_gradient
from autopar.runtime.parameters.shown_tensor import parts_of

_OF_TORCH = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler)  # type: ignore[attr-defined]


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for a `ParallelModel`. It takes the same arguments and is used in the same way.

    `unscale_` is collective: all ranks call it, or `step`, with their optimizers in the same order. Each optimizer has
    one decision of all ranks. The settings of all ranks are equal.

    Example:
        >>> scaler = autopar.GradScaler("cpu", init_scale=1024.0)
        >>> optimizer = torch.optim.AdamW(parallel.parameters())
        >>> loss = parallel.forward_backward(batch, scaler=scaler)
        >>> scaler.unscale_(optimizer)
        >>> norm = parallel.clip_grad_norm_(1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale(), scaler.skipped
        (1024.0, False)
    """

    _agreed = ""  # the settings that all ranks have
    _given_scale: float | None = None  # the scale that the user has set
    _overflow: torch.Tensor | None = None  # the flag of the last step

    @property
    def skipped(self) -> bool:
        """Whether the step before the last `update` was left out, on all ranks, because of an overflow.

        With several optimizers, whether one of them left it out. A flag on a GPU is waited for.
        """
        return self._overflow is not None and bool(self._overflow.item())

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the scale of the next step, as torch's `GradScaler` does.

        Args:
            new_scale: The scale, equal on all ranks. By default it follows from the overflows of this step.

        Example:
            >>> scaler = autopar.GradScaler("cpu")
            >>> loss = parallel.forward_backward(batch, scaler=scaler)
            >>> scaler.update(512.0)
            >>> scaler.get_scale()
            512.0
        """
        if self._enabled:
            states = self._per_optimizer_states.values()
            flags = [flag.reshape(()) for state in states for flag in state["found_inf_per_device"].values()]
            self._overflow = torch.stack(flags).amax() if flags else None
            self._given_scale = self._given_scale if new_scale is None else float(new_scale)
        super().update(new_scale)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for part in parts_of(parameter):
                    gradient = local_gradient(part)
                    if gradient is not None and gradient.numel():
                        by_dtype[gradient.dtype].append(gradient.detach())
        if torch.float16 in by_dtype and not allow_fp16:
            raise RuntimeInputError(
                "gradients are float16, so a scale cannot be taken out of them; keep float32 parameters and pass "
                "plan={..., 'precision': 'fp16'} instead of a model in float16"
            )
        with torch.no_grad():
            for gradients in by_dtype.values():
                private.unscale_and_check(gradients, found_inf, inv_scale)
        return {found_inf.device: self._any_overflow(found_inf)}

    def _any_overflow(self, flags: torch.Tensor) -> torch.Tensor:
        """The largest of the ranks' flags, on every rank. Collective. Settings are compared if that is still open."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return flags
        settings = scaler_settings(self)
        number = seed_from(settings, num_bytes=3)  # exact in float32
        row = torch.stack([flags, torch.full_like(flags, number), torch.full_like(flags, -number)])
        dist.all_reduce(row, op=dist.ReduceOp.MAX)
        if self._agreed != settings:
            if float(row[1]) != -float(row[2]):
                raise RuntimeInputError(
                    f"ranks have scalers with other settings; rank {dist.get_rank()} has {settings}; {SAME_SETTINGS}"
                )
            self._agreed = settings
        return flags.copy_(row[0])


SAME_SETTINGS = "make the scaler with equal arguments, and load the same state, on every rank"


def scaler_settings(scaler: Any) -> str:
    """A scaler's settings that ranks share, as text; empty without one. Its scale follows from them and the flags."""
    if scaler is None:
        return ""
    if not isinstance(scaler, torch.amp.GradScaler):
        return type(scaler).__name__  # refused by `adopted`, on all ranks if all pass one
    if not scaler.is_enabled():
        return ""
    values = {
        "init_scale": scaler._init_scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "steps without overflow at the start": scaler._init_growth_tracker or None,
        "scale that was set": _scale_at_adoption(scaler),
    }
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _scale_at_adoption(scaler: torch.amp.GradScaler) -> float | None:
    """The scale that the user has set, or that a scaler of torch has reached before it is adopted."""
    if isinstance(scaler, GradScaler):
        return scaler._given_scale
    return None if scaler._scale is None else float(scaler._scale)


def adopted(scaler: Any) -> GradScaler:
    """The scaler of a step, whose settings the ranks agree on. One of torch becomes a `GradScaler` in place."""
    if isinstance(scaler, GradScaler):
        scaler._agreed = scaler_settings(scaler)
        return scaler
    if type(scaler) not in _OF_TORCH:
        raise RuntimeInputError(
            f"scaler is a {type(scaler).__name__}, expected an autopar.GradScaler or a torch.amp.GradScaler; other "
            "scalers do not agree with the other ranks about an overflow"
        )
    reached = _scale_at_adoption(scaler) if scaler.is_enabled() else None
    scaler.__class__ = GradScaler
    wrapped: GradScaler = scaler
    wrapped._given_scale = reached
    wrapped._agreed = scaler_settings(wrapped)
    return wrapped
