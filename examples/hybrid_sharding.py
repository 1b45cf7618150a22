"""Hybrid sharding: state is sharded inside each group of ranks and replicated over the groups.

    python examples/hybrid_sharding.py --dp-replicate 2 --dp-shard 2

On a cluster a group is a host: parameters are gathered over its own fast links, and only shards of gradients cross the
network. Ranks of a group follow each other, as torchrun numbers them on a host.
"""

import argparse

import torch
from byte_model import ByteModel
from common import SEED, Text, explained, local_bytes, on_ranks, parser, say, train_steps

import autopar


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dp-replicate", type=int, default=2, help="groups")
    options.add_argument("--dp-shard", type=int, default=2, help="ranks of a group")
    options.add_argument("--zero", type=int, default=3, choices=(1, 2, 3))
    chosen = options.parse_args()
    on_ranks(chosen.dp_replicate * chosen.dp_shard, lambda: train(chosen))


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(SEED)
    model = ByteModel(options.layers, options.width, options.seq_len)
    text = Text(options.batch, options.seq_len)
    dp = options.dp_replicate * options.dp_shard
    parallel = autopar.parallelize(
        model,
        autopar.ClusterSpec.detect(),
        example_inputs=text.batch(0, 0, dp),  # the batch is split over all ranks
        plan={"dp_replicate": options.dp_replicate, "dp_shard": options.dp_shard, "zero": options.zero},
    )
    say(explained(parallel, "Plan for", "Once per step"))
    mesh = parallel.rank_mesh.device_mesh["dp_replicate", "dp_shard"]
    say(f"groups that hold the whole state between them: {mesh.mesh.tolist()}")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    train_steps(parallel, optimizer, text, options.steps, model)
    whole = local_bytes(model.parameters())
    say(f"rank 0 holds {local_bytes(parallel.parameters()):,} of {whole:,} bytes of parameters")


if __name__ == "__main__":
    main()
