"""Tensor parallelism: the ranks share the work of every layer of a Llama with grouped key heads.

    python examples/tensor_parallel.py --tp 2
    python examples/tensor_parallel.py --tp 2 --no-sequence-parallel

With sequence parallelism the values between products (norms, residuals) are split along the sequence too, so no rank
holds a large value twice. The all-reduces become all-gathers and reduce-scatters of the same bytes.
"""

import argparse

import torch
from common import SEED, Text, explained, on_ranks, parser, say, train_steps
from transformers import LlamaConfig, LlamaForCausalLM

import autopar


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tp", type=int, default=2, help="ranks")
    options.add_argument(
        "--sequence-parallel", action=argparse.BooleanOptionalAction, help="(default: where it is cheaper)"
    )
    options.add_argument("--code", action="store_true", help="print the code of a layer")
    chosen = options.parse_args()
    on_ranks(chosen.tp, lambda: train(chosen))


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
        example_inputs=text.batch(0),  # every rank reads the whole batch
        plan={"tp": options.tp, "sequence_parallel": options.sequence_parallel},
        seed=SEED,
    )
    say(explained(parallel, "Plan for", "How parameters", "Collectives"))
    if options.code:
        say(parallel.code("model.layers.0"))  # the code of one rank, with every collective
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    train_steps(parallel, optimizer, text, options.steps, model)


if __name__ == "__main__":
    main()
