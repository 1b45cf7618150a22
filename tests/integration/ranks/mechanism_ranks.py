"""A model on ranks beside the unmodified one on the whole batch: `Ranks.run("mechanism_ranks:worst_error", ...)`."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from mechanism_models import MODELS
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from autopar.api import parallelize
from autopar.errors import CheckpointError

STEPS = 2


class Wide(TorchFunctionMode):
    """Casts to float32 that models write are casts to float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        dtype = lambda a: torch.float64 if a is torch.float32 else a  # noqa: E731
        args, kwargs = _pytree.tree_map(dtype, (args, kwargs or {}))
        return function(*args, **kwargs)


def worst_error(rank: int, world_size: int, name: str, wish: Mapping[str, Any]) -> float:
    """The largest error of a loss or a gradient in steps of SGD, relative to the gradient's norm."""

    def built() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        if len({p.dtype for p in model.parameters()}) == 1:
            model.double()
        return model, {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}

    worst = 0.0
    (model, batch), (reference, _) = built(), built()
    with Wide() if len({p.dtype for p in model.parameters()}) == 1 else contextlib.nullcontext():
        local = {n: t.chunk(wish.get("dp", 1))[0] for n, t in batch.items()}
        parallel = parallelize(model, f"{world_size}xcpu", example_inputs=local, plan=wish)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (parallel, reference)]
        for _ in range(STEPS):
            loss, output = parallel.forward_backward(parallel.local_batch(batch)), reference(**batch)
            expected = output if isinstance(output, torch.Tensor) else output.loss
            expected.backward()
            worst = max(worst, abs(loss.item() - expected.item()))
            gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
            found = parallel.whole_gradients()
            assert wish.get("pp", 1) > 1 or found.keys() == gradients.keys()
            worst = max([worst, *(_error(found[n], gradients[n]) for n in found)])
            norm = torch.stack([g.norm().double() for g in gradients.values()]).norm()
            worst = max(worst, _error(parallel.clip_grad_norm_(1e9), norm))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return worst


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-9))


def resumed_error(rank: int, world_size: int, name: str, wishes: list[Mapping[str, Any]], folder: str) -> float:
    """The largest error of weights: AdamW under a first plan, a checkpoint, AdamW under a second plan."""

    def built() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        return MODELS[name]()

    def made(wish: Mapping[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
        local = {n: t.chunk(wish.get("dp", 1))[0] for n, t in batch.items()}
        parallel = parallelize(built()[0], f"{world_size}xcpu", example_inputs=local, plan=wish)
        return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2, weight_decay=0.1)

    reference, batch = built()
    batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    own = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    worst = 0.0
    for first, wish in enumerate(wishes):
        parallel, optimizer = made(wish)
        if first:
            parallel.load(folder, optimizer)
        for _ in range(STEPS):
            parallel.forward_backward(parallel.local_batch(batch))
            reference(**batch).backward()
            for one in (optimizer, own):
                one.step()
                one.zero_grad()
        expected = dict(reference.named_parameters())
        for n, p in parallel.named_parameters():
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            worst = max(worst, (whole - expected[n]).abs().max().item())
        parallel.save(folder, optimizer, step=STEPS * (first + 1))
    with torch.no_grad():
        parameter = dict(parallel.named_parameters())["weight"]
        parameter.mul_(complex(0.0, float("inf")))
    try:
        parallel.save(folder, step=99)
    except CheckpointError as error:
        assert "the parameter weight holds NaN or infinity" in str(error), error
        return worst
    raise AssertionError("an infinite weight was saved")
