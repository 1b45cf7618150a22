"""What training scripts do around the loop, beside the same script on one device: `Ranks.run("usual_ranks:run", ...)`.

A case takes degrees and the number of ranks. It returns the largest difference from one device.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from loop_ranks import LENGTH, LOCAL, CharGPT, batches, difference, models, whole
from torch import nn, optim
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

from autopar.api import parallelize
from autopar.runtime.model.module import ParallelModel

Wish = Mapping[str, Any]
Batch = dict[str, torch.Tensor]
Case = Callable[[Wish, int], float]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
STEPS = 3
GROUPED = {"kv_heads": 2}  # queries, keys and values are an unequal packing


def steps(
    parallel: ParallelModel, reference: nn.Module, optimizers: Any, rows: Any = batches, num: int = STEPS
) -> float:
    """Some steps of both. The largest difference of a loss or a parameter."""
    worst = 0.0
    for step in range(num):
        own, every = rows(parallel, step)
        losses = [parallel.forward_backward(own), reference(**every)]
        losses[1].backward()
        worst = max(worst, abs(losses[0].item() - losses[1].item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(worst, difference(parallel, reference))


def adam(*trained: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2) for one in trained]


def built(model: nn.Module, example: Any, wish: Wish, world_size: int) -> tuple[ParallelModel, nn.Module]:
    return parallelize(copy.deepcopy(model), f"{world_size}xcpu", example_inputs=example, plan=wish), model


def example() -> Batch:
    idx = torch.randint(30, (LOCAL, LENGTH + 1), generator=torch.Generator().manual_seed(99))
    return {"idx": idx[:, :-1], "targets": idx[:, 1:]}


class Checkpointed(CharGPT):
    reentrant = False

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for attn, ln in zip(self.attn, self.ln, strict=True):
            x = checkpoint(lambda x, attn=attn, ln=ln: x + attn(ln(x)), x, use_reentrant=self.reentrant)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Reentrant(Checkpointed):
    reentrant = True


def checkpointed(wish: Wish, world_size: int) -> float:
    torch.manual_seed(0)
    parallel, reference = built(Checkpointed().double(), example(), wish, world_size)
    return steps(parallel, reference, adam(parallel, reference))


def reentrant(wish: Wish, world_size: int) -> float:
    torch.manual_seed(0)
    parallel, reference = built(Reentrant().double(), example(), wish, world_size)
    return steps(parallel, reference, adam(parallel, reference))


def averaged(wish: Wish, world_size: int) -> float:
    parallel, reference = models(wish, world_size)
    pairs = [
        (m, swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7))) for m in (parallel, reference)
    ]
    optimizers, worst = adam(parallel, reference), 0.0
    for step in range(STEPS):
        worst = max(worst, steps(parallel, reference, optimizers, lambda p, _, s=step: batches(p, s), 1))
        for model, average in pairs:
            average.update_parameters(model)
    own, every = batches(parallel, 9)
    with torch.no_grad():
        found, expected = (average.eval()(**batch) for (_, average), batch in zip(pairs, (own, every), strict=True))
    return max(worst, abs(found.item() - expected.item()), difference(pairs[0][1].module, pairs[1][1].module))


def scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> Case:
    def run(wish: Wish, world_size: int) -> float:
        parallel, reference = models(wish, world_size)
        optimizers = adam(parallel, reference)
        schedulers, worst = [make(optimizer) for optimizer in optimizers], 0.0
        for step in range(5):
            worst = max(worst, steps(parallel, reference, optimizers, lambda p, _, s=step: batches(p, s), 1))
            for scheduler in schedulers:
                scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
        return worst

    return run


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "warm up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "swa": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


def clipped(clip: Callable[[nn.Module], Any], **options: int) -> Case:
    def run(wish: Wish, world_size: int) -> float:
        parallel, reference = models(wish, world_size, **options)
        optimizers, worst = adam(parallel, reference), 0.0
        for step in range(STEPS):
            own, every = batches(parallel, step)
            parallel.forward_backward(own)
            reference(**every).backward()
            norms = [clip(one) for one in (parallel, reference)]
            if norms[0] is not None:
                worst = max(worst, abs(float(norms[0]) - float(norms[1])))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return max(worst, difference(parallel, reference))

    return run


CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    "value foreach": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3, foreach=True),
    "norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-2),
    "norm inf": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-2, norm_type=float("inf")),
    "norm 1": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-2, norm_type=1, foreach=False),
    "norm foreach": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-2, foreach=True),
    "each": lambda m: [nn.utils.clip_grad_norm_([p], 1e-3) for p in m.parameters()] and None,
    "by hand": lambda m: [p.grad.mul_(1e-2 / (p.grad.norm() + 1e-6)) for p in m.parameters()] and None,
}


def every(make: Make, *, matrices: bool = False, **options: int) -> Case:
    def run(wish: Wish, world_size: int) -> float:
        parallel, reference = models(wish, world_size, **options)
        return steps(
            parallel,
            reference,
            [make([p for p in m.parameters() if p.ndim == 2 or not matrices]) for m in (parallel, reference)],
        )

    return run


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "adam amsgrad": lambda p: optim.Adam(p, 1e-2, amsgrad=True, weight_decay=0.1, foreach=False),
    "adam fused": lambda p: optim.Adam(p, 1e-2, fused=True),
    "adamw foreach": lambda p: optim.AdamW(p, 1e-2, foreach=True),
    "adagrad": lambda p: optim.Adagrad(p, 1e-2, eps=1e-6),
    "adagrad foreach": lambda p: optim.Adagrad(p, 1e-2, eps=1e-6, foreach=True),
    "adadelta": lambda p: optim.Adadelta(p, 1.0, foreach=True),
    "adamax": lambda p: optim.Adamax(p, 1e-2, foreach=True),
    "radam": lambda p: optim.RAdam(p, 1e-2, foreach=True),
    "nadam": lambda p: optim.NAdam(p, 1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, 1e-2, centered=True, momentum=0.5, foreach=True),
    "sgd fused": lambda p: optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adagrad fused": lambda p: optim.Adagrad(p, 1e-2, eps=1e-6, fused=True),
    "adafactor": lambda p: optim.Adafactor(p, 1e-2, eps=(1e-8, 1e-3)),
    "adafactor foreach": lambda p: optim.Adafactor(p, 1e-2, eps=(1e-8, 1e-3), foreach=True),
    "muon": lambda p: optim.Muon(p, 1e-2),
    "asgd": lambda p: optim.ASGD(p, 1e-2),
    "rprop": lambda p: optim.Rprop(p, 1e-2),
    "rprop foreach": lambda p: optim.Rprop(p, 1e-2, foreach=True),
}
OF_MATRICES = ["muon", "rprop", "rprop foreach"]


def lbfgs(wish: Wish, world_size: int) -> float:
    parallel, reference = models(wish, world_size)
    optimizers = [optim.LBFGS(m.parameters(), lr=0.5, max_iter=3) for m in (parallel, reference)]
    own, all_rows = batches(parallel, 0)

    def parallel_closure() -> Any:
        optimizers[0].zero_grad()
        return parallel.forward_backward(own)

    def closure() -> Any:
        optimizers[1].zero_grad()
        loss = reference(**all_rows)
        loss.backward()
        return loss

    for _ in range(2):
        optimizers[0].step(parallel_closure)
        optimizers[1].step(closure)
    return difference(parallel, reference)


class Student(CharGPT):
    """Distilled from logits that another model made."""

    def logits(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for attn, ln in zip(self.attn, self.ln, strict=True):
            x = x + attn(ln(x))
        return self.head(x)

    def forward(self, idx: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.logits(idx), taught)


class Teacher(Student):
    def forward(self, idx: torch.Tensor) -> Any:
        logits = self.logits(idx)
        return {"loss": logits.square().mean(), "logits": logits}


class Distilled(nn.Module):
    """A teacher without gradients inside the module that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Student(), Teacher(width=16).eval().requires_grad_(False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher.logits(idx)
        return F.kl_div(
            self.student.logits(idx).log_softmax(-1), taught.log_softmax(-1), log_target=True, reduction="batchmean"
        )


def distilled_outside(wish: Wish, world_size: int) -> float:
    torch.manual_seed(0)
    idx = example()["idx"]
    teacher, reference_teacher = built(Teacher(width=16).double(), {"idx": idx}, wish, world_size)
    student, reference = built(
        Student().double(), {"idx": idx, "taught": torch.randn(*idx.shape, 30).double()}, wish, world_size
    )
    teacher.eval()

    def rows(parallel: ParallelModel, step: int) -> tuple[Batch, Batch]:
        own, all_rows = (one["idx"] for one in batches(parallel, step))
        taught = teacher.evaluate({"idx": own})["logits"].full_tensor()
        with torch.no_grad():
            expected = reference_teacher(all_rows)["logits"]
        return parallel.local_batch({"idx": all_rows, "taught": taught}), {"idx": all_rows, "taught": expected}

    return steps(student, reference, adam(student, reference), rows)


def distilled_inside(wish: Wish, world_size: int) -> float:
    torch.manual_seed(0)
    parallel, reference = built(Distilled().double(), {"idx": example()["idx"]}, wish, world_size)

    def rows(parallel: ParallelModel, step: int) -> tuple[Batch, Batch]:
        return tuple({"idx": one["idx"]} for one in batches(parallel, step))  # type: ignore[return-value]

    return steps(parallel, reference, adam(parallel, reference), rows)


class Gan(nn.Module):
    """Both networks of a GAN. Two numbers choose which loss counts."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 12))
        self.judge = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, real: torch.Tensor, noise: torch.Tensor, judges: torch.Tensor) -> torch.Tensor:
        fake = self.generator(noise)
        judged = F.softplus(-self.judge(real)) + F.softplus(self.judge(fake.detach()))
        made = F.softplus(-self.judge(fake))
        return (judges * judged.mean(-1) + (1 - judges) * made.mean(-1)).mean()


def gan(wish: Wish, world_size: int) -> float:
    torch.manual_seed(0)
    shapes = torch.randn(LOCAL, 12).double(), torch.randn(LOCAL, 8).double(), torch.ones(LOCAL).double()
    parallel, reference = built(Gan().double(), shapes, wish, world_size)
    pairs = []
    for model in (parallel, reference):
        named = dict(model.named_parameters())
        pairs.append(
            [optim.Adam([p for n, p in named.items() if n.startswith(part)], 1e-2) for part in ("judge", "generator")]
        )
    dp = parallel.rank_mesh.sample_ranks.degree
    for step in range(STEPS):
        g = torch.Generator().manual_seed(step)
        for part in range(2):
            rows = [torch.randn(LOCAL * dp, n, generator=g).double() for n in (12, 8)]
            batch = (*rows, torch.full((LOCAL * dp,), 1.0 - part).double())
            parallel(*parallel.local_batch(batch)).backward()
            reference(*batch).backward()
            for model, optimizers in zip((parallel, reference), pairs, strict=True):
                optimizers[part].step()
                model.zero_grad()
    return difference(parallel, reference)


class Generates(Student):
    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = self.logits(idx)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


def generated(wish: Wish, world_size: int) -> float:
    """Training, evaluation and generation by turns."""
    torch.manual_seed(0)
    parallel, reference = built(Generates().double(), example(), wish, world_size)
    optimizers, worst = adam(parallel, reference), 0.0
    for step in range(STEPS):
        own, all_rows = batches(parallel, step)
        loss, expected = parallel.forward_backward(own), reference(**all_rows)["loss"]
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        parallel.eval()
        own, all_rows = batches(parallel, 50 + step)
        with torch.no_grad():
            one, two = parallel(**own), reference(**all_rows)["loss"]
        worst = max(worst, abs(loss.item() - expected.item()), abs(one.item() - two.item()))
        texts = [all_rows["idx"].clone(), all_rows["idx"].clone()]
        for at in range(LENGTH // 2, LENGTH):
            found = parallel.evaluate(parallel.local_batch({"idx": texts[0], "targets": texts[0]}))["logits"]
            texts[0][:, at] = whole(found)[:, at - 1].argmax(-1)
            with torch.no_grad():
                texts[1][:, at] = reference(texts[1], texts[1])["logits"][:, at - 1].argmax(-1)
        worst = max(worst, float((texts[0] != texts[1]).sum()))
        parallel.train()
    return max(worst, difference(parallel, reference))


def lengths(wish: Wish, world_size: int) -> float:
    parallel, reference = models(wish, world_size)

    def rows(parallel: ParallelModel, step: int) -> tuple[Batch, Batch]:
        short = LENGTH - 2 * (step % 3)
        return tuple({n: t[:, :short].contiguous() for n, t in one.items()} for one in batches(parallel, step))  # type: ignore[return-value]

    return steps(parallel, reference, adam(parallel, reference), rows, 6)


def gpt2() -> nn.Module:
    import transformers

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, **none
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


class OwnLoss(nn.Module):
    """A model of transformers with its loss in float64; theirs is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        logits = self.model(**inputs).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def padded_rows(parallel: ParallelModel | None, step: int) -> tuple[Batch, Batch]:
    dp = parallel.rank_mesh.sample_ranks.degree if parallel is not None else 1
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 32, (LOCAL * dp, LENGTH), generator=g)
    kept = torch.arange(LENGTH) >= torch.randint(0, LENGTH // 2, (LOCAL * dp, 1), generator=g)
    batch = {
        "input_ids": ids * kept,
        "attention_mask": kept.long(),
        "position_ids": (kept.long().cumsum(-1) - 1).clamp(min=0),
        "labels": torch.where(kept, ids, -100),
    }
    return parallel.local_batch(batch) if parallel is not None else batch, batch


def left_padded(wish: Wish, world_size: int) -> float:
    model = OwnLoss().double()
    parallel, reference = built(model, padded_rows(None, 0)[0], wish, world_size)
    return steps(parallel, reference, adam(parallel, reference), padded_rows)


class Adapted(nn.Module):
    """A frozen projection with a small trained part beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def adapted(wish: Wish, world_size: int) -> float:
    torch.manual_seed(0)
    model = CharGPT().requires_grad_(False)
    for attn in model.attn:
        attn.c_attn, attn.c_proj = Adapted(attn.c_attn), Adapted(attn.c_proj)
    parallel, reference = built(model.double(), example(), wish, world_size)
    return steps(parallel, reference, adam(parallel, reference))


def lora(wish: Wish, world_size: int) -> float:
    import peft

    model = peft.get_peft_model(
        OwnLoss(), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    ).double()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    parallel, reference = built(model, padded_rows(None, 0)[0], wish, world_size)
    worst = steps(parallel, reference, adam(parallel, reference), padded_rows)
    trained = [n for n, p in parallel.named_parameters() if p.requires_grad]
    assert trained and all("lora" in n for n in trained), trained
    state = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in parallel.state_dict().items()}
    adapters = peft.get_peft_model_state_dict(reference, state_dict=state)
    expected = peft.get_peft_model_state_dict(reference)
    assert adapters.keys() == expected.keys()
    return max(worst, *(float((adapters[n] - expected[n]).abs().max()) for n in expected))


CASES: dict[str, Case] = {
    "checkpointed": checkpointed,
    "reentrant": reentrant,
    **{f"schedule {name}": scheduled(make) for name, make in SCHEDULES.items()},
    **{f"clip {name}": clipped(clip) for name, clip in CLIPS.items()},
    **{f"optimizer {name}": every(make, matrices=name in OF_MATRICES) for name, make in OPTIMIZERS.items()},
    **{
        f"grouped optimizer {name}": every(make, matrices=name in OF_MATRICES, **GROUPED)
        for name, make in OPTIMIZERS.items()
    },
    **{f"grouped clip {name}": clipped(clip, **GROUPED) for name, clip in CLIPS.items()},
    "lbfgs": lbfgs,
    "distilled outside": distilled_outside,
    "distilled inside": distilled_inside,
    "gan": gan,
    "generated": generated,
    "lengths": lengths,
    "left padded": left_padded,
    "adapted": adapted,
    "lora": lora,
}


def run(rank: int, name: str, wish: Wish, world_size: int) -> float:
    return CASES[name](wish, world_size)
