"""Functions of ranks in tests of exports for transformers: `Ranks.run("export_ranks:name", ...)`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoint_ranks import error_of
from pipeline_ranks import whole_everywhere
from torch.distributed.tensor import DTensor

from autopar.api import parallelize
from autopar.runtime.parameters.state_loading import open_state

VOCABULARY, LENGTH = 96, 12


def configured(family: str) -> Any:
    """A small config of a family of transformers."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            attn_pdrop=0,
            resid_pdrop=0,
            embd_pdrop=0,
        )
    if family == "mixtral":
        return transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    if family == "phi3":
        return transformers.Phi3Config(**sizes, pad_token_id=0)
    return transformers.LlamaConfig(**sizes)


def built(family: str, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(configured(family))


def tokens(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (4, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def exported(rank: int, world_size: int, family: str, wish: Mapping[str, Any], folder: str, shard_bytes: int) -> Any:
    """Train a step, export, and import into a model of other weights: logits, whole state, and what differs."""
    batch = tokens()
    rows = 4 // wish.get("dp", 1)
    example = {name: value[:rows] for name, value in batch.items()}
    parallel = parallelize(built(family, 0), f"{world_size}xcpu", example_inputs=example, plan=wish)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.forward_backward(parallel.local_batch(batch))
    optimizer.step()
    parallel.export_hf(folder, max_shard_bytes=shard_bytes)
    again = error_of(lambda: parallel.export_hf(folder))
    state = whole_everywhere({"model": parallel.state_dict()})["model"]
    outputs = parallel.eval().evaluate(parallel.local_batch(batch))
    logits = outputs.get("logits")
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    other = parallelize(built(family, 1), f"{world_size}xcpu", example_inputs=example, plan=wish, state=folder)
    found = whole_everywhere({"model": other.state_dict()})["model"]
    differing = [name for name, value in state.items() if not torch.equal(found[name], value)]
    return logits, state, differing, again


def names_in(folder: Path) -> set[str]:
    return set(open_state(folder))
