"""Train a Llama-style model of about 10 million parameters on four CPU ranks, and check it against one device.

    python examples/demo.py            (or: make demo)

It starts four ranks under torchrun by itself: tensor parallelism 2, data parallelism 2, ZeRO-3. The text is the source
of Python's standard library, byte by byte. The first steps are repeated on one device with the unmodified model.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TP, DP = 2, 2
TOLERANCE = 1e-5  # of the loss, float32
LEARNING_RATE, WARMUP_STEPS, MAX_NORM, SEED = 1e-3, 10, 1.0, 0
MAX_TEXT_BYTES = 4_000_000


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:
        train(options)
    else:
        sys.exit(start_ranks())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--check-steps", type=int, default=5, help="steps that are repeated on one device")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=4, help="sequences of one data-parallel rank")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="where losses and picture go")
    return parser.parse_args()


def start_ranks() -> int:
    """This script again, once per rank; torchrun picks a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(TP * DP)]
    quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "TORCH_LOGS": "-dtensor"}
    print(f"starting {TP * DP} ranks", flush=True)
    return subprocess.run([*launcher, os.path.abspath(__file__), *sys.argv[1:]], env=quiet | os.environ).returncode


def train(options: argparse.Namespace) -> None:
    """What every rank does."""
    import torch
    import torch.distributed as dist

    import autopar

    model = build_model(options)
    text = Text(options.batch, options.seq_len)
    parallel = autopar.parallelize(  # the model is on meta: every rank makes its own shards, from one seed
        model, f"{TP * DP}xcpu", example_inputs=text.batch(0, 0), plan={"tp": TP, "dp": DP, "zero": 3}, seed=SEED
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    schedule = warm_up(optimizer)
    dp_rank = parallel.rank_mesh.dims["dp"].coordinate  # ranks that differ only in tp read the same text
    show = dist.get_rank() == 0
    reference = SingleDevice(model) if show else None
    curve = Curve(tokens_per_step=DP * options.batch * options.seq_len)
    if show:
        print(f"\n{sum(p.numel() for p in model.parameters()):,} parameters, {text.size:,} bytes of text\n")
        print(parallel.plan.explain(), end="\n\n", flush=True)
    with progress_bar(options.steps, show) as advance:
        for step in range(options.steps):
            started = time.perf_counter()
            loss = parallel.forward_backward(text.batch(step, dp_rank))
            parallel.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            curve.add(loss.item(), time.perf_counter() - started)
            if reference is not None and step < options.check_steps:
                curve.reference.append(reference.step(text.global_batch(step)))
            advance(curve)
    if show:
        finish(curve, options)
    dist.barrier()
    dist.destroy_process_group()


def build_model(options: argparse.Namespace) -> Any:
    """A Llama over bytes, on meta: no memory for its weights."""
    import torch
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
        return LlamaForCausalLM(config)


def warm_up(optimizer: Any) -> Any:
    """A learning rate that rises linearly over the first steps."""
    import torch

    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))


class Text:
    """Random windows of the standard library's source; step and data-parallel rank decide which."""

    def __init__(self, batch: int, seq_len: int) -> None:
        import torch

        self.per_rank, self.seq_len = batch, seq_len
        found = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name):
            found += path.read_bytes()
        self._bytes = torch.frombuffer(found[:MAX_TEXT_BYTES], dtype=torch.uint8)
        self.size = len(self._bytes)

    def global_batch(self, step: int) -> dict[str, Any]:
        """The sequences of all data-parallel ranks in one step."""
        import torch

        generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
        starts = torch.randint(self.size - self.seq_len, (DP * self.per_rank,), generator=generator)
        tokens = torch.stack([self._bytes[s : s + self.seq_len] for s in starts.tolist()]).long()
        return {"input_ids": tokens, "labels": tokens.clone()}

    def batch(self, step: int, dp_rank: int) -> dict[str, Any]:
        """One data-parallel rank's part of it."""
        own = slice(dp_rank * self.per_rank, (dp_rank + 1) * self.per_rank)
        return {name: value[own] for name, value in self.global_batch(step).items()}


class SingleDevice:
    """The unmodified model with the same initial weights, trained in plain PyTorch."""

    def __init__(self, model: Any) -> None:
        import torch

        from autopar.runtime.materialise import parameter_source
        from autopar.verification import materialised

        self.model = materialised(model, parameter_source(model, seed=SEED))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.schedule = warm_up(self.optimizer)

    def step(self, batch: dict[str, Any]) -> float:
        import torch

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
        pairs = zip(self.losses, self.reference, strict=False)
        return max((abs(ours - theirs) for ours, theirs in pairs), default=0.0)


class progress_bar:
    """A rich bar with loss and speed on a terminal, a line now and then elsewhere, nothing on other ranks."""

    def __init__(self, steps: int, show: bool) -> None:
        self.steps, self.show, self.bar = steps, show, None

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
    """Say whether the run was right, and leave losses and picture behind. Exits with 1 where it was not."""
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"loss": curve.losses, "seconds": curve.seconds, "single_device_loss": curve.reference}
    (options.out / "losses.json").write_text(json.dumps(content) + "\n")
    print(f"\nlosses: {options.out / 'losses.json'}")
    draw(curve, options.out / "loss.png")
    tail = curve.losses[-max(1, min(20, len(curve.losses) // 4)) :]
    first, last = curve.losses[0], sum(tail) / len(tail)
    checked = f"first {len(curve.reference)} steps against one device: worst difference of the loss"
    print(f"{checked} {curve.worst_difference:.1e} (allowed {TOLERANCE:.0e})")
    print(f"loss: {first:.3f} at the first step, {last:.3f} over the last {len(tail)}", flush=True)
    if not curve.worst_difference <= TOLERANCE:
        sys.exit("demo: the parallel run differs from the single-device run")
    if len(curve.losses) > 1 and not last < first - 0.05:
        sys.exit("demo: the loss did not fall")


def draw(curve: Curve, path: Path) -> None:
    """The loss curve as a picture."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is missing (pip install 'autopar[report]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=120, layout="constrained")
    steps = range(1, len(curve.losses) + 1)
    axes.plot(steps, curve.losses, color="#1f5fa8", label=f"four ranks: tp {TP} × dp {DP}, ZeRO-3")
    checked = range(1, len(curve.reference) + 1)
    axes.plot(checked, curve.reference, "o", mfc="none", color="#c2410c", label="one device, unmodified model")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A 10 M Llama on the source of Python's library")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
