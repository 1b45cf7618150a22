"""The load of experts on ranks, beside the choices of the unmodified model: `Ranks.run("expert_ranks:loads", ...)`."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from autopar.api import parallelize
from autopar.errors import RuntimeInputError

EXPERTS, CHOICES, LENGTH = 6, 2, 8
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 64,
    "moe_intermediate_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "mlp_only_layers": [],
    "num_experts": EXPERTS, "num_experts_per_tok": CHOICES,
}  # fmt: skip


def chosen(model: Qwen3MoeForCausalLM, batch: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """How many choices of each expert the unmodified model makes, by layer."""
    with torch.no_grad():
        every = model(**batch, output_router_logits=True).router_logits
    found = {}
    for layer, logits in enumerate(every):
        choices = logits.topk(CHOICES, -1).indices.reshape(-1)
        found[f"model.layers.{layer}"] = torch.bincount(choices, minlength=EXPERTS).tolist()
    return found


def loads(rank: int, wish: Mapping[str, Any], world_size: int) -> list[dict[str, list[int]]]:
    """The load that ranks count, and the load of the unmodified model."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
    ids = torch.randint(64, (4, LENGTH))
    local = {"input_ids": ids[:2], "labels": ids[:2]}
    parallel = parallelize(copy.deepcopy(model), f"{world_size}xcpu", example_inputs=local, plan=wish)
    dp = parallel.plan.degrees.dp
    batch = {"input_ids": ids[: 2 * dp], "labels": ids[: 2 * dp]}
    counted = parallel.expert_load(parallel.local_batch(batch))
    return [{path: counts.tolist() for path, counts in counted.items()}, chosen(model, batch)]


def load_without_experts(rank: int, world_size: int) -> str:
    """The message for a model that has no experts."""
    batch = (torch.randn(4, 8), torch.arange(4))
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
    loss_fn = torch.nn.functional.cross_entropy
    parallel = parallelize(model, f"{world_size}xcpu", example_inputs=batch, plan={"tp": 2}, loss_fn=loss_fn)
    try:
        parallel.expert_load(batch)
    except RuntimeInputError as error:
        return str(error)
    return "no error"
