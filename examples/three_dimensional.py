"""Tensor × pipeline × data parallelism with ZeRO-3 and sequence parallelism on eight ranks, and back onto one device.

    python examples/three_dimensional.py
    python examples/three_dimensional.py --schedule zbv-zero-bubble --recompute full

The model's embedding is its last projection too: the first and the last stage hold a copy each and sum its gradients
once a step. The state that eight ranks save is then loaded into the unmodified model on one device.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from byte_model import ByteModel
from common import (
    HELD_OUT,
    SEED,
    Text,
    compare,
    explained,
    held_out_loss,
    loss_of,
    on_one_device,
    on_ranks,
    parser,
    say,
    state_of,
    train_steps,
)

import autopar
from autopar.ir.schedules.registry import SCHEDULES


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tp", type=int, default=2)
    options.add_argument("--pp", type=int, default=2)
    options.add_argument("--dp", type=int, default=2)
    options.add_argument("--zero", type=int, default=3, choices=(0, 1, 2, 3))
    options.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b")
    options.add_argument("--micro-batches", type=int, default=2)
    options.add_argument("--recompute", choices=("none", "full"), default="none")
    options.add_argument("--save", type=Path, help="keep the state in this folder")
    chosen = options.parse_args()
    on_ranks(chosen.tp * chosen.pp * chosen.dp, lambda: train(chosen))


def train(options: argparse.Namespace) -> None:
    with torch.device("meta"):  # no rank ever holds the whole model
        model = ByteModel(options.layers, options.width, options.seq_len, tied=True)
    text = Text(options.batch, options.seq_len)
    wish = ("tp", "pp", "dp", "zero", "schedule", "micro_batches", "recompute")
    parallel = autopar.parallelize(
        model,
        autopar.ClusterSpec.detect(),
        example_inputs=text.batch(0, 0, options.dp),
        plan={name: getattr(options, name) for name in wish},
        seed=SEED,
    )
    say(explained(parallel, "Plan for", "How parameters", "Once per step"))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    train_steps(parallel, optimizer, text, options.steps, model)

    loss = held_out_loss(parallel, text)
    with tempfile.TemporaryDirectory() as folder:
        where = [str(options.save or folder)]
        dist.broadcast_object_list(where)  # of the folders that the ranks made, the first rank's
        dcp.save(state_of(parallel, optimizer), checkpoint_id=where[0])
        if dist.get_rank() == 0:
            plain = on_one_device(model)
            state = plain.state_dict()
            dcp.load({"model": state}, checkpoint_id=where[0], no_dist=True)
            plain.load_state_dict(state)
            compare("held-out text, from the saved state", loss, loss_of(plain, text.batch(HELD_OUT)))
        dist.barrier()  # the folder stays until it has been read


if __name__ == "__main__":
    main()
