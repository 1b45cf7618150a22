"""A long run with everything it needs. It is killed, and resumed on the next sample under another plan.

    python examples/long_run.py
    autopar status long_run_output --follow          (beside it, in another terminal)

Both plans train in bfloat16, recompute some activations, never hold all logits, and keep the optimizer's state on the
host. The run saves while it trains, and its ranks are killed between two checkpoints. Four new ranks go on from the
newest one, and export the model at the end. With `--check` the same steps run once more without the kill.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import MAX_NORM, SEED, Batch, Text, on_ranks, parser, say, start_ranks
from demo import build_model, warm_up
from torch.utils.data import Dataset

import autopar

RANKS, LEARNING_RATE = 4, 1e-3
LESS_MEMORY = {"precision": "bf16", "recompute": "selective", "loss_chunks": 4, "offload": "optimizer"}
PLANS: dict[str, dict[str, Any]] = {
    "first": {"tp": 2, "dp": 2, "zero": 3, **LESS_MEMORY},
    "second": {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 2, **LESS_MEMORY},
}


class Windows(Dataset[Batch]):
    """The text in windows of equal length."""

    def __init__(self, text: Text, count: int) -> None:
        self.text, self.count = text, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        return {name: tokens[0] for name, tokens in self.text.batch(index).items()}


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:  # a rank, started below or by your own torchrun
        on_ranks(RANKS, lambda: train(options))
        return
    given = sys.argv[1:]
    shutil.rmtree(options.out, ignore_errors=True)
    start_ranks(RANKS, [*given, "--plan", "first", "--die-after", str(options.kill)], quiet=True)
    print(f"\nall ranks were killed after step {options.kill}; four new ranks go on under the second plan", flush=True)
    status = start_ranks(RANKS, [*given, "--plan", "second"])
    if status == 0 and options.check:
        whole = options.out / "without_the_kill"
        status = start_ranks(RANKS, [*given, "--plan", "first", "--out", str(whole)])
        compare(options.out, whole)
    sys.exit(status)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("long_run_output"), help="the run directory; replaced")
    options.add_argument("--save-every", type=int, default=4, help="steps between checkpoints")
    options.add_argument("--kill", type=int, default=10, help="the step after which the ranks are killed")
    options.add_argument("--check", action="store_true", help="train once more without the kill, and compare")
    options.add_argument("--plan", choices=tuple(PLANS), default="first", help=argparse.SUPPRESS)
    options.add_argument("--die-after", type=int, help=argparse.SUPPRESS)
    found = options.parse_args()
    found.hidden = found.width
    return found


def train(options: argparse.Namespace) -> None:
    """The work of every rank: the same script starts a run and continues it."""
    windows = Windows(Text(1, options.seq_len), count=options.batch * options.steps // 2)  # two epochs
    first = torch.utils.data.default_collate([windows[i] for i in range(options.batch // 2)])
    parallel = autopar.parallelize(
        build_model(options), f"{RANKS}xcpu", example_inputs=first, plan=PLANS[options.plan], seed=SEED
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    schedule = warm_up(optimizer)
    loader = parallel.loader(windows, shuffle=True, seed=SEED)
    state = {"schedule": schedule, "data": loader}

    with autopar.Run(options.out, parallel, total_steps=options.steps) as run:
        done = parallel.latest_step(run.checkpoints) or 0
        if done:
            parallel.load(run.checkpoints, optimizer, state)
            say(f"loaded the checkpoint of step {done}")
        batches = epochs(loader)
        for step in range(done + 1, options.steps + 1):
            loss = parallel.forward_backward(next(batches))
            norm = parallel.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.log(step, loss, learning_rate=schedule.get_last_lr()[0], gradient_norm=norm)
            say(f"step {step:3}  loss {loss.item():.4f}")
            if step % options.save_every == 0:
                parallel.save(run.checkpoints, optimizer, state, step=step, keep_last=2, asynchronous=True)
            if step == options.die_after:
                os.kill(os.getpid(), signal.SIGKILL)  # as a machine that is taken away
        parallel.finish_saving()
        parallel.export_hf(options.out / "exported")
    say(f"transformers loads the model: from_pretrained({str(options.out / 'exported')!r})")


def epochs(loader: Any) -> Iterator[Any]:
    """The batches of one epoch after another. The first epoch may begin in its middle."""
    while True:
        yield from loader


def compare(resumed: Path, whole: Path) -> None:
    """Print the largest difference of a loss between two runs."""
    one, other = losses(resumed), losses(whole)
    assert one.keys() == other.keys(), (one.keys(), other.keys())
    worst = max(one, key=lambda step: abs(one[step] - other[step]))
    print(
        f"{len(one)} losses with and without the kill differ by at most {abs(one[worst] - other[worst]):.1e} "
        f"(step {worst}: {one[worst]:.4f} and {other[worst]:.4f})"
    )


def losses(run: Path) -> dict[int, float]:
    """The loss of every step of a run. A line that repeats a step replaces the line before."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


if __name__ == "__main__":
    main()
