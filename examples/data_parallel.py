"""Data parallelism: every rank trains on its part of the batch and holds its part of the state (ZeRO).

    python examples/data_parallel.py --zero 1 --save state
    python examples/data_parallel.py --zero 3 --load state         (goes on where the other stopped)

| `--zero` | parameters                          | gradients are summed     | optimizer state |
|----------|-------------------------------------|--------------------------|-----------------|
| 0        | whole on every rank                 | once a step              | whole           |
| 1        | gathered once a step                | once a step, kept sharded| sharded         |
| 2        | gathered once a step                | every micro-batch        | sharded         |
| 3        | gathered when a layer needs them    | every micro-batch        | sharded         |
"""

import argparse
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from byte_model import ByteModel
from common import (
    SEED,
    Text,
    explained,
    held_out_loss,
    local_bytes,
    make_moments,
    on_ranks,
    parser,
    say,
    state_of,
    train_steps,
)

import autopar


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dp", type=int, default=2, help="ranks")
    options.add_argument("--zero", type=int, default=3, choices=(0, 1, 2, 3))
    options.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    options.add_argument("--save", type=Path, help="a folder for the state after the last step")
    options.add_argument("--load", type=Path, help="a folder with the state to begin from")
    chosen = options.parse_args()
    on_ranks(chosen.dp, lambda: train(chosen))


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(SEED)
    model = ByteModel(options.layers, options.width, options.seq_len)
    text = Text(options.batch, options.seq_len)
    parallel = autopar.parallelize(
        model,
        autopar.ClusterSpec.detect(),
        example_inputs=text.batch(0, 0, options.dp),
        plan={"dp": options.dp, "zero": options.zero, "accumulate": options.accumulate},
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    say(explained(parallel, "Plan for", "Once per step"))
    if options.load is None:
        train_steps(parallel, optimizer, text, options.steps, model)
    else:
        make_moments(optimizer)
        dcp.load(state_of(parallel, optimizer), checkpoint_id=options.load)  # in place, under any plan
        say(f"loaded: held-out loss {held_out_loss(parallel, text):.6f}")
        train_steps(parallel, optimizer, text, options.steps, None)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    say(f"rank 0 holds {local_bytes(parallel.parameters()):,} bytes of parameters, {local_bytes(moments):,} of moments")
    if options.save is not None:
        say(f"saved: held-out loss {held_out_loss(parallel, text):.6f}")
        dcp.save(state_of(parallel, optimizer), checkpoint_id=options.save)


if __name__ == "__main__":
    main()
