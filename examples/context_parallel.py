"""Context parallelism: the ranks share each sequence. A rank computes its own tokens of every layer.

    python examples/context_parallel.py
    python examples/context_parallel.py --cp 4 --dp 1 --seq-len 1024
    python examples/context_parallel.py --code

Parameters are whole on every context rank, and ZeRO divides their state over `dp` × `cp`. Only attention needs tokens
of other ranks: heads are exchanged for tokens, or keys and values are gathered. The labeller takes what is cheaper.
"""

import argparse

import torch
from common import SEED, Text, explained, on_ranks, parser, say, train_steps
from transformers import LlamaConfig, LlamaForCausalLM

import autopar


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    options.add_argument("--dp", type=int, default=2, help="ranks with sequences of their own")
    options.add_argument("--zero", type=int, default=3)
    options.add_argument("--code", action="store_true", help="print the code of a layer")
    options.set_defaults(seq_len=256, batch=8)
    chosen = options.parse_args()
    on_ranks(chosen.cp * chosen.dp, lambda: train(chosen))


def train(options: argparse.Namespace) -> None:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=options.seq_len,
        use_cache=False,
    )
    with torch.device("meta"):  # no rank ever holds the whole model
        model = LlamaForCausalLM(config)
    text = Text(options.batch, options.seq_len)
    parallel = autopar.parallelize(
        model,
        autopar.ClusterSpec.detect(),
        example_inputs=text.batch(0, 0, options.dp),  # the sequences of one data-parallel rank
        plan={"cp": options.cp, "dp": options.dp, "zero": options.zero},
        seed=SEED,
    )
    say(explained(parallel, "Plan for", "How parameters", "Collectives"))
    if options.code:
        say(parallel.code("model.layers.0"))  # the code of one rank, with every collective
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    train_steps(parallel, optimizer, text, options.steps, model)


if __name__ == "__main__":
    main()
