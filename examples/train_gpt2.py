"""Train a GPT-2 on text of your own, split as you say.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt2.py --tp 2 --text README.md

The weights start from GPT-2's own initialisation. The bytes of the text are the tokens. `--save` writes a checkpoint
that loads under any other split, and on one device.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import GPT2Config, GPT2LMHeadModel

import autopar


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT-2 on text of your own.")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences of one data-parallel rank")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--save", type=Path, help="a folder for the checkpoint")
    options = parser.parse_args()

    config = GPT2Config(
        vocab_size=256,
        n_positions=options.seq_len,
        n_embd=options.hidden,
        n_layer=options.layers,
        n_head=8,
        loss_type="ForCausalLM",
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):  # no rank ever holds the whole model
        model = GPT2LMHeadModel(config)
    cluster = autopar.ClusterSpec.detect()  # the devices of this torchrun job
    tokens = torch.zeros(options.batch, options.seq_len, dtype=torch.long)
    parallel = autopar.parallelize(
        model,
        cluster,
        example_inputs={"input_ids": tokens, "labels": tokens.clone()},
        plan={"tp": options.tp, "zero": options.zero},
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)

    # Ranks that differ only in tp must read the same data; the seed follows the data-parallel coordinate.
    generator = torch.Generator().manual_seed(parallel.rank_mesh.dims["dp"].coordinate)
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.seq_len, (options.batch,), generator=generator)
        ids = torch.stack([text[s : s + options.seq_len] for s in starts.tolist()]).long()
        loss = parallel.forward_backward({"input_ids": ids, "labels": ids.clone()})
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
    if options.save is not None:
        dcp.save(parallel.state_dict(), checkpoint_id=options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
