"""Seconds of a training script until it can train, at its first start and at the next: python benchmarks/start.py

Four gloo ranks run one script as torchrun starts it. The first start captures the model and keeps the program, the
second reads it. Each figure is the median of several rounds, of the slowest rank. The peer is plain FSDP2 on the same
ranks: what a start takes without autopar.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 4
PARTS = ("torch", "autopar", "model", "parallelize", "first step", "process")


def start(plan: str, peer: bool) -> None:
    """One rank: print the seconds of its parts as JSON."""
    seconds, last = {}, time.perf_counter()

    def ended(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[part], last = now - last, now

    import torch
    import torch.distributed as dist

    ended("torch")
    if not peer:
        from autopar import parallelize
    ended("autopar")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, vocab_size=1024
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 1024, (2, 64))
    batch = {"input_ids": ids, "labels": ids}
    ended("model")
    if peer:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        ended("parallelize")
        model(**batch).loss.backward()
    else:
        wish = json.loads(plan)
        parallel = parallelize(model, f"{RANKS}xcpu", example_inputs=batch, plan=wish or None)
        ended("parallelize")
        parallel.forward_backward(batch)
    ended("first step")
    Path(os.environ["START_OUT"], os.environ["RANK"]).write_text(json.dumps(seconds))
    dist.barrier()  # no rank ends while another one still sends
    dist.destroy_process_group()


def measured(folder: str, *words: str) -> dict[str, float]:
    """The parts of a start whose captures are kept in `folder`, of the slowest rank."""
    with tempfile.TemporaryDirectory() as out:
        env = os.environ | {"AUTOPAR_CACHE_DIR": folder, "START_OUT": out, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        began = time.perf_counter()
        subprocess.run([*command, __file__, "--rank", *words], check=True, env=env, capture_output=True)
        whole = time.perf_counter() - began
        ranks = [json.loads(path.read_text()) for path in Path(out).iterdir()]
    return {part: max(rank[part] for rank in ranks) for part in PARTS[:-1]} | {"process": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default='{"tp": 2, "dp": 2}', help="degrees as JSON; {} searches a plan")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return start(arguments.plan, arguments.peer)
    words, rounds = ("--plan", arguments.plan), {"first": [], "second": [], "FSDP2": []}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds["first"].append(measured(folder, *words))
            rounds["second"].append(measured(folder, *words))
            rounds["FSDP2"].append(measured(folder, "--peer"))
    print(f"{'seconds':12}", *(f"{name:>8}" for name in rounds), f"{'second / FSDP2':>15}")
    for part in PARTS:
        first, second, peer = (statistics.median(one[part] for one in found) for found in rounds.values())
        ratio = f"{second / peer:15.2f}" if peer > 0.01 else f"{'-':>15}"
        print(f"{part:12} {first:8.2f} {second:8.2f} {peer:8.2f} {ratio}")


if __name__ == "__main__":
    main()
