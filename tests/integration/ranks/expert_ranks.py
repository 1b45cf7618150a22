"""Mixtures on ranks, beside the unmodified model: `Ranks.run("expert_ranks:loads", ...)`."""

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


def norms(rank: int, wish: dict[str, Any], clipping: str, foreach: bool | None, world_size: int) -> list[float]:
    """The norms of all gradients before three steps of AdamW, as this rank sees them."""
    model, batch = small_mixture(8)
    own = {n: t.chunk(wish["dp"])[rank // (world_size // wish["dp"])] for n, t in batch.items()}
    parallel = parallelize(model, f"{world_size}xcpu", example_inputs=own, plan=wish)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, foreach=foreach)
    found = []
    for _ in range(3):
        parallel.forward_backward(own)
        if clipping == "ours":
            norm = parallel.clip_grad_norm_(0.1)
        else:
            norm = torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.1, foreach=foreach)
        found.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return found


def norms_of_one_device() -> list[float]:
    """The same of the unmodified model."""
    model, batch = small_mixture(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        model(**batch).loss.backward()
        found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def small_mixture(batch: int) -> tuple[Qwen3MoeForCausalLM, dict[str, torch.Tensor]]:
    """A mixture of eight experts in float32, and a batch: torch has no float64 kernel for products in groups."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, "num_experts": 8}))
    ids = torch.randint(64, (batch, LENGTH))
    return model, {"input_ids": ids, "labels": ids}
