"""Training loops as people write them, beside the same loop on one device: `Ranks.run("loop_ranks:name", ...)`."""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.api import parallelize
from autopar.errors import RuntimeInputError
from autopar.runtime.model.module import ParallelModel

Loop = Callable[[nn.Module, Callable[[int], torch.Tensor]], None]
LENGTH, STEPS, LOCAL = 8, 3, 4


class Attention(nn.Module):
    """Queries, keys and values from one projection with a bias, as in the small public GPTs."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sizes = [width, width // heads * kv_heads, width // heads * kv_heads]
        self.c_attn, self.c_proj, self.head = nn.Linear(width, sum(self.sizes)), nn.Linear(width, width), width // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, -1, self.head).transpose(1, 2) for y in self.c_attn(x).split(self.sizes, dim=2))
        k = k.tanh()  # else the gradient of its bias is rounding, which optimizers blow up
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class CharGPT(nn.Module):
    """A character model with a tied head and a temperature that is one number.

    With fewer `kv_heads` than heads, the projection of queries, keys and values is an unequal packing.
    """

    def __init__(self, vocab: int = 30, width: int = 24, heads: int = 4, kv_heads: int | None = None) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(LENGTH, width)
        self.attn = nn.ModuleList(Attention(width, heads, kv_heads or heads) for _ in range(2))
        self.ln = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for attn, ln in zip(self.attn, self.ln, strict=True):
            x = x + attn(ln(x))
        logits = self.head(x) * self.temperature
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Lamb(torch.optim.Optimizer):
    """LAMB, as in the public single-file implementations: the step of a matrix is scaled by two norms of it."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / state["v"].sqrt().add(1e-6)
                ratio = p.data.pow(2).sum().sqrt() / update.pow(2).sum().sqrt()
                p.data.add_(update * ratio, alpha=-group["lr"])


class Muon(torch.optim.Optimizer):
    """Muon, as in the public single-file implementations, in the parameters' own precision: torch's takes bfloat16."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 0.05)
                x = p.grad.lerp(buffer, 0.95)
                is_tall = x.size(-2) > x.size(-1)
                x = x.mT if is_tall else x
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.mT if is_tall else x
                p.add_(x, alpha=-group["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only, decided by the number of dimensions."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


OPTIMIZERS: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "decay by dim": lambda model: torch.optim.AdamW(decayed(model), lr=1e-2),
    "fused": lambda model: torch.optim.AdamW(decayed(model), lr=1e-2, fused=True),
    "foreach": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2, foreach=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "muon": lambda model: Muon([p for p in model.parameters() if p.ndim == 2], 1e-2),
    "lamb": lambda model: Lamb(model.parameters(), 1e-2),
}


def models(wish: Mapping[str, Any], world_size: int, **options: Any) -> tuple[ParallelModel, nn.Module]:
    torch.manual_seed(0)
    model = CharGPT(**options).double()
    idx = torch.randint(30, (LOCAL, LENGTH + 1))
    example = {"idx": idx[:, :-1], "targets": idx[:, 1:]}
    return parallelize(copy.deepcopy(model), f"{world_size}xcpu", example_inputs=example, plan=wish), model


def batches(parallel: ParallelModel, step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The rows of this rank, and the rows of all data-parallel ranks."""
    dp = parallel.rank_mesh.sample_ranks
    idx = torch.randint(30, (LOCAL * dp.degree, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    own = idx[dp.coordinate * LOCAL : (dp.coordinate + 1) * LOCAL]
    return tuple({"idx": rows[:, :-1].clone(), "targets": rows[:, 1:].clone()} for rows in (own, idx))  # type: ignore[return-value]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full: Callable[[], torch.Tensor] = getattr(tensor, "full_tensor", lambda: tensor)
    return full().detach()


def difference(parallel: ParallelModel, reference: nn.Module) -> float:
    expected = dict(reference.named_parameters())
    return max(float((whole(p) - expected[n].detach()).abs().max()) for n, p in parallel.named_parameters())


def trained(
    rank: int, wish: Mapping[str, Any], world_size: int, name: str, clips: bool, options: Mapping[str, Any]
) -> float:
    """The largest difference of a parameter after some steps, with torch's own clipping of gradients."""
    parallel, reference = models(wish, world_size, **options)
    optimizers = [OPTIMIZERS[name](model) for model in (parallel, reference)]
    for step in range(STEPS):
        own, every = batches(parallel, step)
        parallel.forward_backward(own)
        reference(**every).backward()
        if clips:
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (parallel, reference)]
            assert abs(norms[0].item() - norms[1].item()) < 1e-9, norms
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return difference(parallel, reference)


def seen(rank: int, wish: Mapping[str, Any], world_size: int, options: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What differs between the parameters that a user sees and the model's own."""
    parallel, reference = models(wish, world_size, **options)
    own, _ = batches(parallel, 0)
    parallel.forward_backward(own)
    found: list[tuple[Any, ...]] = []
    pairs = list(zip(parallel.named_parameters(), reference.named_parameters(), strict=True))
    for (name, p), (expected, q) in pairs:
        for tensor in (p, p.grad, p.data, p.detach()):
            assert tensor is not None
            facts = (name, tuple(tensor.shape), tensor.dim(), tensor.ndim, tensor.numel(), tuple(tensor.size()))
            if facts != (expected, tuple(q.shape), q.dim(), q.ndim, q.numel(), tuple(q.size())):
                found.append(facts)
        if not torch.equal(whole(p), q.detach()):
            found.append((name, "other values"))
        if q.dim() == 2 and not torch.equal(whole(p.T[:, 1:3]), q.detach().T[:, 1:3]):
            found.append((name, "other rows"))
    return found


def _set_data(p: Any) -> None:
    p.data = torch.arange(p.numel(), dtype=p.dtype).view(p.shape)


def _set_gradient(p: Any) -> None:
    p.grad = torch.arange(p.numel(), dtype=p.dtype).view(p.shape)
    p.data.copy_(p.grad)


@torch.library.custom_op("autopar_tests::decay_in_place", mutates_args=("value",))
def decay_in_place(rate: float, gradient: torch.Tensor, value: torch.Tensor) -> None:
    """Like the kernels of 8-bit optimizers: it changes an operand that is not the first."""
    value.sub_(gradient.cumsum(0) * rate)


CHANGES: Mapping[str, Callable[[Any], Any]] = {
    "data": _set_data,
    "gradient": _set_gradient,
    "mask": lambda p: p.data.__setitem__(p > 0, 0.5),
    "rows": lambda p: p.detach().__setitem__(0, 1.0),
    "copied": lambda p: p.data.add_(copy.deepcopy(p).detach(), alpha=0.5),
    "copy changed": lambda p: copy.deepcopy(p).detach().zero_(),
    "factors": lambda p: p.data.mul_(p.detach().abs().mean(-1, keepdim=True)),
    "numbers": lambda p: p.data.mul_(p.norm(1) + p.mean() + p.amax() + p.min() + p.norm(float("inf")) + p.std()),
    "chosen": lambda p: p.data.copy_(torch.where(p > 0.1, p, torch.ones_like(p))),
    "custom operator": lambda p: decay_in_place(0.1, p.detach().sin(), p.data),
    "named": lambda p: p.data.add_(len(repr(p)) > 0),
}


def changed(rank: int, wish: Mapping[str, Any], world_size: int, options: Mapping[str, Any]) -> dict[str, float]:
    """What users do to a parameter outside an optimizer: the largest difference after each change."""
    found = {}
    for name, change in CHANGES.items():
        pair = models(wish, world_size, **options)
        with torch.no_grad():
            for model in pair:
                for p in model.parameters():
                    if p.dim():
                        change(p)
        found[name] = difference(*pair)
    return found


def compiled_step(rank: int, wish: Mapping[str, Any], world_size: int) -> str:
    parallel, _ = models(wish, world_size)
    parallel.forward_backward(batches(parallel, 0)[0])
    optimizer = torch.optim.AdamW(parallel.parameters())
    try:
        torch.compile(optimizer.step, backend="eager")()
    except Exception as error:
        return str(error)
    return "no error"


def norm_in_stages(rank: int, wish: Mapping[str, Any], world_size: int) -> list[str]:
    """The messages of torch's norms over the gradients of a pipeline."""
    parallel, _ = models(wish, world_size)
    parallel.forward_backward(batches(parallel, 0)[0])
    messages = []
    for norm in (
        lambda: torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0),
        lambda: torch.nn.utils.get_total_norm([p.grad for p in parallel.parameters() if p.grad is not None]),
    ):
        try:
            norm()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    torch.nn.utils.clip_grad_value_(parallel.parameters(), 1e-3)
    assert all(float(whole(p.grad).abs().max()) <= 1e-3 for p in parallel.parameters() if p.grad is not None)
    return messages


def called(rank: int, wish: Mapping[str, Any], world_size: int, calls: int) -> float:
    """The largest difference of a loss or a parameter in the loop of one device: `calls` losses for each step."""
    parallel, reference = models(wish, world_size)
    optimizers = [OPTIMIZERS["decay by dim"](model) for model in (parallel, reference)]
    worst = 0.0
    for step in range(STEPS):
        for call in range(calls):
            _, every = batches(parallel, calls * step + call)
            with parallel.no_sync() if call < calls - 1 else nullcontext():
                loss = parallel(**parallel.local_batch(every))
                (loss / calls).backward()
            expected = reference(**every)
            (expected / calls).backward()
            worst = max(worst, abs(loss.item() - expected.item()))
        for model, optimizer in zip((parallel, reference), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        _, every = batches(parallel, 99)
        worst = max(worst, abs(parallel(parallel.local_batch(every)).item() - reference(**every).item()))
    return max(worst, difference(parallel, reference))


def called_in_stages(rank: int, wish: Mapping[str, Any], world_size: int) -> str:
    parallel, _ = models(wish, world_size)
    try:
        parallel(**batches(parallel, 0)[0])
    except RuntimeInputError as error:
        return str(error)
    return "no error"


def refused(rank: int, wish: Mapping[str, Any], world_size: int) -> list[str]:
    """The messages of loops that would train on other numbers."""
    parallel, _ = models(wish, world_size)
    own, _ = batches(parallel, 0)
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]

    def with_autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            parallel.forward_backward(own)

    def evaluated_with_autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            parallel.evaluate(own)

    messages = []
    for loop in (
        with_autocast,
        evaluated_with_autocast,
        lambda: parallel.forward_backward(own).backward(),
        lambda: (parallel.forward_backward(own) / 4).backward(),
        lambda: scaler.scale(parallel.forward_backward(own)).backward(),
    ):
        try:
            loop()
        except RuntimeInputError as error:
            messages.append(str(error))
    return messages


def hooked(rank: int, wish: Mapping[str, Any], world_size: int, options: Mapping[str, Any]) -> tuple[float, list[str]]:
    """The largest difference if hooks halve gradients and update parameters, and the names of the calls in order."""
    parallel, reference = models(wish, world_size, **options)
    called: list[str] = []
    optimizers: list[dict[str, torch.optim.Optimizer]] = []
    for model in (parallel, reference):
        each = {n: torch.optim.SGD([p], lr=0.1) for n, p in model.named_parameters()}
        optimizers.append(each)
        for name, p in model.named_parameters():
            handle = p.register_hook(lambda grad: 1 / 0)
            handle.remove()
            p.register_hook(lambda grad: grad * 0.5)

            def update(parameter: torch.Tensor, name: str = name, each: Any = each) -> None:
                if each is optimizers[0]:
                    called.append(name)
                each[name].step()
                each[name].zero_grad()

            p.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        own, every = batches(parallel, step)
        parallel.forward_backward(own)
        reference(**every).backward()
    return difference(parallel, reference), called


def summed_calls(rank: int, wish: Mapping[str, Any], world_size: int, options: Mapping[str, Any]) -> float:
    """The largest difference of a gradient after two calls without `zero_grad`; a hook sees each call alone."""
    parallel, reference = models(wish, world_size, **options)
    for model in (parallel, reference):
        for p in model.parameters():
            p.register_hook(lambda grad: grad / (1 + grad.abs()))
    for step in range(2):
        own, every = batches(parallel, step)
        parallel.forward_backward(own)
        reference(**every).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    return max(float((whole(p.grad) - expected[n]).abs().max()) for n, p in parallel.named_parameters())  # type: ignore[operator,arg-type]


def noisy(rank: int, wish: Mapping[str, Any], world_size: int, alike: bool) -> tuple[str, list[int]]:
    """Steps with noise on the gradients, from `parallel.generator` or from each rank's own numbers.

    The error of the next step, and the sums of the noise of the parts.
    """
    torch.manual_seed(0)
    model = CharGPT(kv_heads=2).double()
    batch = {"idx": torch.zeros(LOCAL, LENGTH, dtype=torch.int64), "targets": torch.zeros(LOCAL, LENGTH).long()}
    parallel = parallelize(model, f"{world_size}xcpu", example_inputs=batch, plan=wish)
    optimizer, seen = torch.optim.SGD(parallel.parameters(), lr=0.1), []
    own = torch.Generator().manual_seed(rank)
    try:
        for _ in range(3):
            parallel.forward_backward(batch)
            for parameter in parallel.parameters():
                generator = parallel.generator(parameter) if alike else own
                for part in getattr(parameter, "parts", (parameter,)):
                    local = part.grad.to_local() if hasattr(part.grad, "to_local") else part.grad
                    noise = torch.randn(local.shape, generator=generator, dtype=local.dtype)
                    local.add_(noise)
                    seen.append(float(noise.sum()))
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeInputError as error:
        return str(error), seen
    return "", seen


def changed_on_one_rank(rank: int, wish: Mapping[str, Any], world_size: int) -> str:
    """The error of a step if rank 1 changes an attribute of its model."""
    model = nn.Sequential(nn.Linear(8, 12), nn.LeakyReLU(0.1), nn.Linear(12, 4))
    batch = (torch.randn(4, 8), torch.arange(4))
    given = {"example_inputs": batch, "loss_fn": F.cross_entropy, "plan": wish}
    parallel = parallelize(model, f"{world_size}xcpu", **given)
    parallel.forward_backward(batch)
    if rank == 1:
        model[1].negative_slope = 0.2
    try:
        parallel.forward_backward(batch)
    except RuntimeInputError as error:
        return str(error)
    return ""
