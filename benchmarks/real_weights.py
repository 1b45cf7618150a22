"""Memory and seconds of `parallelize` with real weights: python benchmarks/real_weights.py

A Llama of 0.54 GB in float32 goes to four gloo ranks. Either every rank builds it, or rank 0 alone, and the other ranks
build it on meta. Every run has new processes. It prints, for rank 0 and for the largest of the other ranks, by how much
the peak of resident memory lies above the memory before the model is built. It also prints the largest part that a rank
holds, and the seconds of `parallelize` on the slowest rank.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paired import slowest
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

import autopar

WORLD = 4
PLANS: dict[str, dict[str, Any]] = {
    "tp 4": {"tp": 4},
    "dp 4 ZeRO-3": {"dp": 4, "zero": 3},
    "pp 2 x tp 2": {"pp": 2, "tp": 2, "micro_batches": 2},
}


def built(on: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=896,
        intermediate_size=3584,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(on):
        model: nn.Module = LlamaForCausalLM(config)
    return model


def run(rank: int, folder: str, plan: dict[str, Any], everywhere: bool, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", store=FileStore(os.path.join(folder, "store"), WORLD), rank=rank, world_size=WORLD)
    ids = torch.arange(4 * 16).reshape(4, 16)
    batch = {"input_ids": ids, "labels": ids}
    built("meta")  # imports
    before = peak_bytes()
    model = built("cpu" if everywhere or rank == 0 else "meta")
    dist.barrier()
    start = time.perf_counter()
    parallel = autopar.parallelize(model, f"{WORLD}xcpu", example_inputs=batch, plan=plan)
    seconds = slowest(time.perf_counter() - start)
    part = sum(getattr(p, "_local_tensor", p).nbytes for p in parallel.parameters())
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, (peak_bytes() - before, part, sum(p.nbytes for p in model.parameters())))
    if rank == 0:
        peaks, parts, whole = zip(*found, strict=True)
        Path(out).write_text(json.dumps([peaks[0], max(peaks[1:]), max(parts), max(whole), seconds]))
    dist.destroy_process_group()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("every rank", "rank 0"), help="who builds the model; both by default")
    chosen = parser.parse_args().only
    print("| plan | built on | peak of rank 0, MB | of another rank, MB | a rank's part, MB | model, MB | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name, plan in PLANS.items():
        for who in ("every rank", "rank 0") if chosen is None else (chosen,):
            with tempfile.TemporaryDirectory() as folder:
                out = f"{folder}/out.json"
                arguments = (folder, plan, who == "every rank", out)
                torch.multiprocessing.spawn(run, args=arguments, nprocs=WORLD)
                *sizes, seconds = json.loads(Path(out).read_text())
            shown = " | ".join(f"{size / 1e6:.0f}" for size in sizes)
            print(f"| {name} | {who} | {shown} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
