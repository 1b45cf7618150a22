"""Pipeline parallelism: each rank holds a stage of a GPT-2. The first and the last stage share the embedding.

    python examples/pipeline_parallel.py --schedule 1f1b
    python examples/pipeline_parallel.py --schedule interleaved-1f1b --virtual-stages 2
    python examples/pipeline_parallel.py --cut-at transformer.h.1           (cut by hand, at a module's name)

autopar cuts the captured model so that the slowest stage is as fast as possible. The modules need not be a chain. All
ranks pass the same batch, and each stage takes the inputs of its own blocks.
"""

import argparse

import torch
import torch.distributed as dist
from common import (
    SEED,
    Text,
    explained,
    held_out_loss,
    on_ranks,
    parser,
    say,
    train_steps,
)
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.ir.schedules.registry import SCHEDULES, actions


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--pp", type=int, default=2, help="ranks")
    options.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b")
    options.add_argument("--virtual-stages", type=int, help="stages of a rank (default: the fewest of the schedule)")
    options.add_argument("--micro-batches", type=int, default=4)
    options.add_argument("--cut-at", help="names of the modules at which stages after the first begin")
    chosen = options.parse_args()
    on_ranks(chosen.pp, lambda: train(chosen))


def train(options: argparse.Namespace) -> None:
    config = GPT2Config(
        vocab_size=256,
        n_positions=options.seq_len,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=4,
        resid_pdrop=0.0,  # dropout draws other numbers on one device, and the first loss could not be compared
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        loss_type="ForCausalLM",
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):  # no rank ever holds another stage's weights
        model = GPT2LMHeadModel(config)
    text = Text(options.batch, options.seq_len)
    wish = {name: getattr(options, name) for name in ("pp", "schedule", "virtual_stages", "micro_batches", "cut_at")}
    parallel = autopar.parallelize(
        model,
        autopar.ClusterSpec.detect(),
        example_inputs=text.batch(0),
        plan={name: value for name, value in wish.items() if value is not None},
        seed=SEED,
    )
    say(explained(parallel))
    show_stages(parallel)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    train_steps(parallel, optimizer, text, options.steps, model)
    say(f"held-out loss {held_out_loss(parallel, text):.4f}")


def show_stages(parallel: autopar.ParallelModel) -> None:
    """Every rank's weights, and its passes in their order: 0F1 is stage 0, forward, micro-batch 1."""
    degrees = parallel.plan.degrees
    order = actions(degrees.schedule, degrees.pp, degrees.virtual_stages, degrees.micro_batches)
    own = sorted({".".join(name.split(".")[:3]) for name, _ in parallel.named_parameters()})
    held = [[""]] * degrees.pp
    dist.all_gather_object(held, own)
    for rank in range(degrees.pp):
        say(f"rank {rank} holds {', '.join(held[rank])}")
        say(f"rank {rank} runs {' '.join(str(action) for action in order[rank])}")


if __name__ == "__main__":
    main()
