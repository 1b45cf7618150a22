"""`GradScaler`: torch's loss scaling, with one decision of all ranks about an overflow.

A rank sees the gradients of its own shards and pipeline stages. torch's `GradScaler` looks at these gradients alone, so
one rank would skip a step that another rank takes. Here the flag of an overflow is the maximum over all ranks, whatever
mesh dimension they lie on. All ranks skip the step, and all lower their scale once.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import private
from autopar.errors import RuntimeInputError
from autopar.runtime.parameters.gradients import local_gradient
from autopar.runtime.parameters.user_view import parts_of

_OF_TORCH = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler)  # type: ignore[attr-defined]


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for a `ParallelModel`. It takes the same arguments and is used in the same way.

    `unscale_` is collective: all ranks call it, or `step`, with their optimizers in the same order. Each optimizer has
    one decision of all ranks.

    Example:
        >>> scaler = autopar.GradScaler("cpu", init_scale=1024.0)
        >>> optimizer = torch.optim.AdamW(parallel.parameters())
        >>> loss = parallel.forward_backward(batch, scaler=scaler)
        >>> scaler.unscale_(optimizer)
        >>> norm = parallel.clip_grad_norm_(1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale()
        1024.0
    """

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
        return {found_inf.device: any_overflow(found_inf)}


def any_overflow(found: torch.Tensor) -> torch.Tensor:
    """The largest of the ranks' flags, on every rank. Collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found


def adopted(scaler: Any) -> GradScaler:
    """The scaler of a step. A scaler of torch becomes a `GradScaler` in place, with its scale and its counts.

    Raises RuntimeInputError for an object that is no scaler of torch.
    """
    if isinstance(scaler, GradScaler):
        return scaler
    if type(scaler) not in _OF_TORCH:
        raise RuntimeInputError(
            f"scaler is a {type(scaler).__name__}, expected an autopar.GradScaler or a torch.amp.GradScaler; other "
            "scalers do not agree with the other ranks about an overflow"
        )
    scaler.__class__ = GradScaler
    found: GradScaler = scaler
    return found
