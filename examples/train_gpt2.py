"""Train a GPT-2 on text of your own, split as you say.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt2.py --tp 2 --text README.md

The weights start from GPT-2's own initialisation. The bytes of the text are the tokens. `--save` writes a checkpoint
that loads under any other split, and on one device. `autopar status runs/train_gpt2` shows the run while it goes on.
"""

import argparse
from itertools import islice
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
    parser.add_argument("--run", type=Path, default=Path("runs/train_gpt2"), help="the directory of the run")
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

    # Equal parts of the text are the samples. The loader gives each data-parallel rank its part of every batch.
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
    samples = text[: len(text) // options.seq_len * options.seq_len].view(-1, options.seq_len).long()
    loader = parallel.loader([{"input_ids": ids, "labels": ids} for ids in samples], shuffle=True)
    step = 0
    with autopar.Run(options.run, parallel, total_steps=options.steps) as run:
        while step < options.steps:
            for batch in islice(loader, options.steps - step):
                loss = parallel.forward_backward(batch)
                norm = parallel.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.log(step, loss, gradient_norm=norm)
                if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
                    print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
                step += 1
    if options.save is not None:
        dcp.save(parallel.state_dict(), checkpoint_id=options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
