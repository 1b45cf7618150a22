"""Expert parallelism: some of the data-parallel ranks also split the experts of a mixture.

    python examples/expert_parallel.py
    python examples/expert_parallel.py --ep 4 --dispatch gather
    python examples/expert_parallel.py --code

Every rank has tokens of its own, and the matrices of some experts. Rows of tokens travel to the ranks of their experts
and back. Or the ranks gather all tokens, and add up what their experts made of them. The labeller takes the cheaper
way.
"""

import argparse

import torch
from common import SEED, Text, explained, on_ranks, parser, say, train_steps
from transformers import MixtralConfig, MixtralForCausalLM

import autopar


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dp", type=int, default=4, help="ranks with sequences of their own")
    options.add_argument("--ep", type=int, default=2, help="how many of them split the experts")
    options.add_argument("--zero", type=int, default=3)
    options.add_argument("--dispatch", choices=("exchange", "gather"), help="how rows meet their experts")
    options.add_argument("--code", action="store_true", help="print the code of a layer")
    options.set_defaults(batch=8)
    chosen = options.parse_args()
    on_ranks(chosen.dp, lambda: train(chosen))


def train(options: argparse.Namespace) -> None:
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=options.seq_len,
        use_cache=False,
    )
    with torch.device("meta"):  # no rank ever holds the whole model
        model = MixtralForCausalLM(config)
    text = Text(options.batch, options.seq_len)
    parallel = autopar.parallelize(
        model,
        autopar.ClusterSpec.detect(),
        example_inputs=text.batch(0, 0, options.dp),  # the sequences of one data-parallel rank
        plan={"dp": options.dp, "ep": options.ep, "zero": options.zero, "dispatch": options.dispatch},
        seed=SEED,
    )
    say(explained(parallel, "Plan for", "How parameters", "Collectives"))
    if options.code:
        say(parallel.code("model.layers.0"))  # the code of one rank, with every collective
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    train_steps(parallel, optimizer, text, options.steps, model)


if __name__ == "__main__":
    main()
