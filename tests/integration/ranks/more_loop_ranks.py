"""More training loops beside the same loop on one device: `Ranks.run("more_loop_ranks:name", ...)`."""

import copy
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from loop_ranks import LENGTH, LOCAL, STEPS, CharGPT, batches, decayed, whole
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from autopar.api import parallelize
from autopar.errors import RuntimeInputError
from autopar.runtime.model.module import ParallelModel


class GroupedGPT(nn.Module):
    """Queries, keys and values of other sizes in one projection: its parts are parameters of their own."""

    def __init__(self, vocab: int = 30, width: int = 24) -> None:
        super().__init__()
        self.wte, self.qkv_proj = nn.Embedding(vocab, width), nn.Linear(width, 2 * width)
        self.o_proj, self.head = nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx)
        b, t, c = x.shape
        parts = self.qkv_proj(x).split([24, 12, 12], -1)
        q, k, v = (part.view(b, t, -1, 6).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k.tanh(), v, is_causal=True, enable_gqa=True)
        logits = self.head(x + self.o_proj(y.transpose(1, 2).reshape(b, t, c)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CheckpointedGPT(CharGPT):
    """The layers are computed again in the backward pass, as the model's author wrote it."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for attn, ln in zip(self.attn, self.ln, strict=True):
            x = checkpoint(lambda y, attn=attn, ln=ln: y + attn(ln(y)), x, use_reentrant=False)
        logits = self.head(x) * self.temperature
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class AdaptedGPT(CharGPT):
    """A frozen model with a small trained product beside its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(24, 4, bias=False), nn.Linear(4, 24, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx)
        x = x + self.attn[0](self.ln[0](x)) + self.up(self.down(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Duel(nn.Module):
    """A generator and its judge with both losses in one call: each part gets the gradient of its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12))
        self.judge = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        fake = self.generator(noise)
        of_judge = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake.detach())).mean()
        fixed = {name: p.detach() for name, p in self.judge.named_parameters()}
        return of_judge + F.softplus(-torch.func.functional_call(self.judge, fixed, (fake,))).mean()


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12))

    def forward(self, x: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
        return F.kl_div(F.log_softmax(self.body(x), -1), soft, reduction="batchmean")


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        return {"loss": y.sum(), "y": y}


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "grouped": GroupedGPT,
    "checkpointed": CheckpointedGPT,
    "adapted": AdaptedGPT,
    "compiled": CharGPT,
    "plain": CharGPT,
}


def models(wish: Mapping[str, Any], world_size: int, name: str = "plain") -> tuple[ParallelModel, nn.Module]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    idx = torch.randint(30, (LOCAL, LENGTH + 1))
    example = {"idx": idx[:, :-1], "targets": idx[:, 1:]}
    given: Any = copy.deepcopy(model)
    given = torch.compile(given) if name == "compiled" else given
    return parallelize(given, f"{world_size}xcpu", example_inputs=example, plan=wish), model


def difference(parallel: ParallelModel, reference: nn.Module) -> float:
    """The largest difference between two state dicts of the same names and shapes."""
    own, expected = parallel.state_dict(), reference.state_dict()
    if parallel.plan.degrees.pp > 1:  # a rank has the weights of its stages
        expected = {name: expected[name] for name in own}
    assert list(own) == list(expected) or set(own) == set(expected), (list(own), list(expected))
    return max(float((_whole(own[name]) - expected[name]).abs().max()) for name in expected)


def _whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def steps(
    pair: tuple[ParallelModel, nn.Module],
    optimizers: list[torch.optim.Optimizer],
    after: Callable[[tuple[float, float]], None] = lambda losses: None,
    lengths: tuple[int, ...] = (LENGTH,) * STEPS,
) -> float:
    """The largest difference of a loss in a loop that is written for one device."""
    worst = 0.0
    for step, length in enumerate(lengths):
        _, every = batches(pair[0], step)
        every = {name: rows[:, :length].contiguous() for name, rows in every.items()}
        losses = pair[0](**pair[0].local_batch(every)), pair[1](**every)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = losses[0].item(), losses[1].item()
        worst = max(worst, abs(found[0] - found[1]))
        after(found)
    return worst


def adamw(pair: tuple[ParallelModel, nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in pair]


def trained(rank: int, wish: Mapping[str, Any], world_size: int, name: str) -> float:
    pair = models(wish, world_size, name)
    worst = steps(pair, adamw(pair))
    return max(worst, difference(*pair))


def of_lengths(rank: int, wish: Mapping[str, Any], world_size: int) -> float:
    pair = models(wish, world_size)
    worst = steps(pair, adamw(pair), lengths=(8, 5, 8, 6))
    return max(worst, difference(*pair))


def averaged(rank: int, wish: Mapping[str, Any], world_size: int, name: str) -> float:
    """The largest difference of an average of the weights, of its loss, and of the trained weights."""
    pair = models(wish, world_size, name)
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True) for model in pair]

    def update(_: tuple[float, float]) -> None:
        for average, model in zip(averages, pair, strict=True):
            average.update_parameters(model)

    worst = steps(pair, adamw(pair), update)
    _, every = batches(pair[0], 7)
    with torch.no_grad():
        worst = max(worst, abs(averages[0](**pair[0].local_batch(every)).item() - averages[1](**every).item()))
    saved, expected = averages[0].state_dict(), averages[1].state_dict()
    assert saved.keys() == expected.keys(), saved.keys() ^ expected.keys()
    worst = max(worst, *(float((_whole(saved[n]) - expected[n]).abs().max()) for n in expected))
    return max(worst, difference(*pair))


def average_in_another_order(rank: int, wish: Mapping[str, Any], world_size: int) -> str:
    """The message of torch's average in its default form."""
    parallel, _ = models(wish, world_size)
    try:
        AveragedModel(parallel)
    except RuntimeInputError as error:
        return str(error)
    return "no error"


SCHEDULERS: Mapping[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=5),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 3)], [1]
    ),
}


def scheduled(rank: int, wish: Mapping[str, Any], world_size: int, name: str) -> float:
    pair = models(wish, world_size)
    optimizers = adamw(pair)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in optimizers]

    def update(losses: tuple[float, float]) -> None:
        for scheduler, loss in zip(schedulers, losses, strict=True):
            scheduler.step(*[loss] if name == "plateau" else [])

    worst = steps(pair, optimizers, update)
    return max(worst, difference(*pair))


def of_two_models(rank: int, wish: Mapping[str, Any], world_size: int) -> float:
    """The largest difference of a generator with its judge, and of a student with its teacher."""
    torch.manual_seed(0)
    every = [(torch.randn(16, 8).double(), torch.randn(16, 12).double()) for _ in range(STEPS)]
    duel, student, teacher = Duel().double(), Student().double(), Teacher().double()
    cluster, worst = f"{world_size}xcpu", 0.0
    example = tuple(rows[:LOCAL] for rows in every[0])
    split_duel = parallelize(copy.deepcopy(duel), cluster, example_inputs=example, plan=wish)
    split_student = parallelize(copy.deepcopy(student), cluster, example_inputs=example, plan=wish)
    split_teacher = parallelize(copy.deepcopy(teacher), cluster, example_inputs=example[:1], plan=wish)
    optimizers = [
        torch.optim.Adam([p for name, p in model.named_parameters() if name.startswith(part)], lr=1e-2)
        for model in (split_duel, duel, split_student, student)
        for part in ({"generator", "judge"} if isinstance(model, Duel) or model is split_duel else {"body"})
    ]
    for step in range(STEPS):
        noise, real = (rows[: LOCAL * split_duel.plan.degrees.dp] for rows in every[step])
        soft = split_teacher.evaluate(split_teacher.local_batch((noise,)))["y"]
        targets = torch.softmax(whole(soft), -1)
        losses = [
            split_duel(*split_duel.local_batch((noise, real))),
            duel(noise, real),
            split_student(*split_student.local_batch((noise, targets))),
            student(noise, torch.softmax(teacher(noise)["y"].detach(), -1)),
        ]
        for loss in losses:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, *(abs((losses[i] - losses[i + 1]).item()) for i in (0, 2)))
    return max(worst, difference(split_duel, duel), difference(split_student, student))


def generated(rank: int, wish: Mapping[str, Any], world_size: int) -> bool:
    """Whether greedy generation in a window of fixed length between steps gives the tokens of one device."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.attn, self.head = nn.Embedding(30, 24), nn.Linear(24, 24), nn.Linear(24, 30)

        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
            x = self.wte(idx)
            x = x + self.attn(x.cumsum(1))
            logits = self.head(x)
            return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}

    reference = Model().double()
    idx = torch.randint(30, (LOCAL, LENGTH))
    example = {"idx": idx, "targets": idx}
    parallel = parallelize(copy.deepcopy(reference), f"{world_size}xcpu", example_inputs=example, plan=wish)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (parallel, reference)]
    for step in range(2):
        _, every = batches(parallel, step)
        for loss, optimizer in zip(
            (parallel(**parallel.local_batch(every)), reference(**every)["loss"]), optimizers, strict=True
        ):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        start = every["idx"].clone()
        tokens = [start.clone(), start.clone()]
        parallel.eval()
        for at in range(3, LENGTH):
            ids = tokens[0]
            logits = parallel.evaluate(parallel.local_batch({"idx": ids, "targets": ids}))["logits"]
            tokens[0][:, at] = whole(logits)[:, at - 1].argmax(-1)
            with torch.no_grad():
                tokens[1][:, at] = reference(idx=tokens[1], targets=tokens[1])["logits"][:, at - 1].argmax(-1)
        parallel.train()
        if not torch.equal(*tokens):
            return False
    return True


BY_ELEMENT: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "single": lambda m: torch.optim.AdamW(decayed(m), lr=1e-2, foreach=False),
    "fused": lambda m: torch.optim.AdamW(decayed(m), lr=1e-2, fused=True),
    "foreach": lambda m: torch.optim.RAdam(m.parameters(), lr=1e-2, foreach=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-1, momentum=0.9, nesterov=True),
}


def by_element(rank: int, wish: Mapping[str, Any], world_size: int, name: str) -> float:
    """Optimizers of single elements on the parts of a packing, with torch's clipping by norm and by value."""
    pair = models(wish, world_size, "grouped")
    optimizers = [BY_ELEMENT[name](model) for model in pair]
    for step in range(STEPS):
        _, every = batches(pair[0], step)
        for loss, model, optimizer in zip(
            (pair[0](**pair[0].local_batch(every)), pair[1](**every)), pair, optimizers, strict=True
        ):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return difference(*pair)


def saved(rank: int, wish: Mapping[str, Any], world_size: int, name: str, other: Mapping[str, Any]) -> float:
    """The largest difference if training goes on under `other`, from the saved state of model and optimizer."""
    pair = models(wish, world_size, name)
    optimizers = adamw(pair)
    worst = steps(pair, optimizers)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save({"model": pair[0].state_dict(), "optimizer": optimizers[0].state_dict()}, checkpoint_id=folder[0])

    again, _ = models(other, world_size, name)
    with torch.no_grad():
        for p in again.parameters():
            p.mul_(0.5)
    resumed = adamw((again, again))[0]
    for p in again.parameters():
        p.grad = torch.zeros_like(p)
    resumed.step()  # makes the state that is loaded into
    resumed.zero_grad()
    state = {"model": again.state_dict(), "optimizer": resumed.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    worst = max(worst, steps((again, pair[1]), [resumed, optimizers[1]]))
    return max(worst, difference(again, pair[1]))


def loaded(rank: int, wish: Mapping[str, Any], world_size: int, name: str) -> tuple[float, list[str]]:
    """The largest difference after `load_state_dict` of whole tensors, and the messages of states that do not fit."""
    parallel, reference = models(wish, world_size, name)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.5)
    state = reference.state_dict()
    assert not any(parallel.load_state_dict(state))
    first = next(iter(parallel.state_dict()))  # of this stage
    messages = []
    for wrong in (
        {n: v for n, v in state.items() if not n.startswith("head") and n != "wte.weight"},
        state | {"other": torch.zeros(1)},
        state | {first: torch.zeros(7, 9)},
    ):
        try:
            parallel.load_state_dict(wrong)
        except RuntimeInputError as error:
            messages.append(str(error))
    parallel.load_state_dict({}, strict=False)
    return difference(parallel, reference), messages


Named = Mapping[str, nn.Parameter]
TERMS: dict[str, Callable[[Named, Named], Any]] = {
    "squares": lambda own, first: sum(p.pow(2).sum() for p in own.values()),
    "absolute values": lambda own, first: sum(p.abs().sum() for p in own.values()),
    "norms": lambda own, first: sum(p.norm() for p in own.values()),
    "distance to the start": lambda own, first: sum((p - first[n]).pow(2).mean() for n, p in own.items()),
    "largest values": lambda own, first: sum(p.abs().max() for p in own.values()),
    "turned matrices": lambda own, first: sum(
        (p.T @ p - torch.eye(p.shape[1], dtype=p.dtype)).square().sum() for n, p in own.items() if p.dim() == 2
    ),
}


def with_terms(rank: int, wish: Mapping[str, Any], world_size: int, model: str) -> dict[str, float]:
    """The largest difference of a gradient, or of the term, with terms on parameters beside the loss."""
    parallel, reference = models(wish, world_size, model)
    in_stages, found = parallel.plan.degrees.pp > 1, dict[str, float]()
    first = [{n: p.detach().clone() + 0.1 for n, p in model.named_parameters()} for model in (parallel, reference)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (parallel, reference)]
    for step, (name, term) in enumerate(TERMS.items()):
        own, every = batches(parallel, step)
        held = dict(parallel.named_parameters())
        expected = dict(reference.named_parameters())
        if in_stages:
            parallel.forward_backward(own)
            value = 0.1 * term(held, first[0])
            value.backward()
        elif step % 2:  # the term before the loss, or behind it
            value = 0.1 * term(held, first[0])
            (value + parallel(**own)).backward()
        else:
            loss = parallel(**own)
            value = 0.1 * term(held, first[0])
            (loss + value).backward()
        there = 0.1 * term(expected, first[1])
        (reference(**every) + there).backward()
        worst = [0.0 if in_stages else abs(float(value) - float(there))]
        worst += [(whole(p.grad) - expected[n].grad).abs().max().item() for n, p in held.items()]
        found[name] = max(worst)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def with_terms_in_no_sync(rank: int, wish: Mapping[str, Any], world_size: int) -> str:
    parallel, _ = models(wish, world_size)
    own, _ = batches(parallel, 0)
    try:
        with parallel.no_sync():
            for _ in range(2):
                (parallel(**own) + sum(p.pow(2).sum() for p in parallel.parameters())).backward()
    except RuntimeInputError as error:
        return str(error)
    return "no error"
