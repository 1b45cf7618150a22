"""Train a Llama-style model of about 10 million parameters on several CPU ranks, and check it against one device.

    python examples/demo.py                 (or: make demo)            4 ranks: tp 2 × dp 2, ZeRO-3
    python examples/demo.py --plan 3d       (or: make demo PLAN=3d)    8 ranks: pp 2 × tp 2 × dp 2, ZeRO-3, 1F1B

It starts its ranks under torchrun by itself. The text is the source of Python's standard library, byte by byte. The
first steps are repeated on one device with the unmodified model.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import MAX_NORM, SEED, TOLERANCE, Batch, Text, on_one_device, on_ranks
from torch import nn

import autopar

LEARNING_RATE, WARMUP_STEPS = 1e-3, 10
LOW_TOLERANCE = 0.02  # of the mean of the last losses in low precision, relative to float32 on one device
LAST = 20  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Degrees of the mesh, and the number of steps that two CPU cores make in about two minutes."""

    words: str
    num_ranks: int
    plan: dict[str, Any]
    steps: int


PLANS = {
    "2d": Choice(words="four ranks: tp 2 × dp 2, ZeRO-3", num_ranks=4, plan={"tp": 2, "dp": 2, "zero": 3}, steps=60),
    "3d": Choice(
        words="eight ranks: pp 2 × tp 2 × dp 2, ZeRO-3",
        num_ranks=8,
        plan={"pp": 2, "tp": 2, "dp": 2, "zero": 3, "schedule": "1f1b", "micro_batches": 2},
        steps=30,
    ),
}


def main() -> None:
    options = arguments()
    on_ranks(PLANS[options.plan].num_ranks, lambda: train(options))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", choices=tuple(PLANS), default="2d", help="what is split (default: 2d)")
    parser.add_argument("--precision", choices=("bf16", "fp16"), help="dtype of computing (default: float32)")
    parser.add_argument("--steps", type=int, help="(default: what two cores make in some two minutes)")
    parser.add_argument("--check-steps", type=int, default=5, help="steps that are repeated on one device")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=4, help="sequences of one data-parallel rank")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="where losses and picture go")
    return parser.parse_args()


def train(options: argparse.Namespace) -> None:
    """The work of every rank."""
    choice = PLANS[options.plan]
    plan = choice.plan | ({"precision": options.precision} if options.precision else {})
    steps = options.steps or choice.steps
    model = build_model(options)
    parts = choice.plan["dp"]
    text = Text(parts * options.batch, options.seq_len)
    parallel = autopar.parallelize(  # the model is on meta: every rank makes its own shards, from one seed
        model, f"{choice.num_ranks}xcpu", example_inputs=text.batch(0, 0, parts), plan=plan, seed=SEED
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    schedule = warm_up(optimizer)
    dp = parallel.rank_mesh.sample_ranks  # ranks that differ only in tp, cp or pp read the same text
    show = dist.get_rank() == 0
    reference = SingleDevice(model) if show else None
    curve = Curve(tokens_per_step=text.sequences * text.seq_len)
    if show:
        print(f"\n{sum(p.numel() for p in model.parameters()):,} parameters, {text.size:,} bytes of text\n")
        print(parallel.plan.explain(), end="\n\n", flush=True)
    with progress_bar(steps, show) as advance:
        for step in range(steps):
            started = time.perf_counter()
            loss = parallel.forward_backward(text.batch(step, dp.coordinate, dp.degree))
            parallel.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            curve.add(loss.item(), time.perf_counter() - started)
            if reference is not None and step < options.check_steps:
                curve.reference.append(reference.step(text.batch(step)))
            advance(curve)
    if show:
        finish(curve, options)


def build_model(options: argparse.Namespace) -> nn.Module:
    """A Llama over bytes, on meta: no memory for its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=options.seq_len,
        use_cache=False,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model


def warm_up(optimizer: Any) -> Any:
    """A learning rate that rises linearly over the first steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))


class SingleDevice:
    """The unmodified model with the same initial weights, trained in plain PyTorch."""

    def __init__(self, model: nn.Module) -> None:
        self.model = on_one_device(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.schedule = warm_up(self.optimizer)

    def step(self, batch: Batch) -> float:
        loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


@dataclass
class Curve:
    """Losses and times of the steps so far, and the single device's losses of the checked ones."""

    tokens_per_step: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)

    def add(self, loss: float, seconds: float) -> None:
        self.losses.append(loss)
        self.seconds.append(seconds)

    @property
    def tokens_per_s(self) -> float:
        recent = self.seconds[-10:]
        return self.tokens_per_step * len(recent) / sum(recent)

    @property
    def worst_difference(self) -> float:
        """The largest difference of a loss from the single device's."""
        pairs = zip(self.losses, self.reference, strict=False)
        return max((abs(ours - theirs) for ours, theirs in pairs), default=0.0)

    @property
    def difference_of_means(self) -> float:
        """The relative difference of the mean over the last checked steps. Single losses of small batches are noisy."""
        if not self.reference:
            return 0.0
        ours, theirs = (sum(each[: len(self.reference)][-LAST:]) for each in (self.losses, self.reference))
        return abs(ours - theirs) / theirs


class progress_bar:
    """A rich bar with loss and speed on a terminal, a line now and then elsewhere, nothing on other ranks."""

    def __init__(self, steps: int, show: bool) -> None:
        self.steps, self.show = steps, show
        self.bar: Any = None

    def __enter__(self) -> Any:
        if self.show and sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.description}"))
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps)
        return self.advance

    def advance(self, curve: Curve) -> None:
        done = len(curve.losses)
        words = f"loss {curve.losses[-1]:.3f}  {curve.tokens_per_s:,.0f} tokens/s"
        if 0 < len(curve.reference) == done:
            words += f"  single device differs by {abs(curve.losses[-1] - curve.reference[-1]):.1e}"
        if self.bar is not None:
            self.bar.update(self.task, advance=1, description=words)
        elif self.show and (0 < len(curve.reference) == done or done % 10 == 0 or done == self.steps):
            print(f"step {done:4}/{self.steps}  {words}", flush=True)

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def finish(curve: Curve, options: argparse.Namespace) -> None:
    """Print whether the run was right, and write losses and picture. Exits with 1 if it was wrong."""
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"loss": curve.losses, "seconds": curve.seconds, "single_device_loss": curve.reference}
    (options.out / "losses.json").write_text(json.dumps(content) + "\n")
    print(f"\nlosses: {options.out / 'losses.json'}")
    draw(curve, options.out / "loss.png", PLANS[options.plan].words)
    tail = curve.losses[-max(1, min(LAST, len(curve.losses) // 4)) :]
    first, last = curve.losses[0], sum(tail) / len(tail)
    count = len(curve.reference)
    checked = f"first {count} steps against one device"
    if options.precision is None:
        found, allowed, what = curve.worst_difference, TOLERANCE, "worst difference of the loss"
    else:
        found, allowed = curve.difference_of_means, LOW_TOLERANCE
        what = f"in float32, relative difference of the mean loss of the last {min(LAST, count)}"
    print(f"{checked}: {what} {found:.1e} (allowed {allowed:.0e})")
    print(f"loss: {first:.3f} at the first step, {last:.3f} over the last {len(tail)}", flush=True)
    if not found <= allowed:
        sys.exit("demo: the parallel run differs from the single-device run")
    if len(curve.losses) > 1 and not last < first - 0.05:
        sys.exit("demo: the loss did not fall")


def draw(curve: Curve, path: Path, words: str) -> None:
    """The loss curve as a picture with the title `words`."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is missing (pip install 'matplotlib>=3.11,<4')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=120, layout="constrained")
    steps = range(1, len(curve.losses) + 1)
    axes.plot(steps, curve.losses, color="#1f5fa8", label=words)
    checked = range(1, len(curve.reference) + 1)
    axes.plot(checked, curve.reference, "o", mfc="none", color="#c2410c", label="one device, unmodified model")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A 10 M Llama on the source of Python's library")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
