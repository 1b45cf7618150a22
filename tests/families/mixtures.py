"""Mixtures of experts of transformers as tiny models, by their config's `model_type`.

``mixtures:name`` is a factory for `autopar.commands.verify.verify`. Models are in float32, so that experts are
multiplied in groups; `verify` and the tests compute in float64.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from zoo import randomise

Example = tuple[nn.Module, dict[str, Any]]
TOKENS, LOCAL_BATCH, VOCABULARY = 16, 4, 64
COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {
    "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_group": 4, "topk_group": 2, "head_dim": 4,
}  # fmt: skip
NAMED = {"num_experts": 8, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 8}
ROUTED = {"moe_intermediate_size": 16, "n_routed_experts": 8, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": LOCAL,
    "qwen2_moe": {**NAMED, "shared_expert_intermediate_size": 16},
    "qwen3_moe": NAMED,
    "qwen3_next": {**NAMED, "shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * 2},
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
    "gpt_oss": {**LOCAL, "sliding_window": 8},
    "glm4_moe": ROUTED,
    "dots1": {**ROUTED, "n_shared_experts": 1},
    "olmoe": NAMED,
    "flex_olmo": NAMED,
    "granitemoe": LOCAL,
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 16},
    "ernie4_5_moe": {"moe_intermediate_size": 16, "moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "minimax": LOCAL,
    "minimax_m2": LOCAL,
    "cohere2_moe": {"num_experts": 8},
    "afmoe": {**NAMED, "num_dense_layers": 0},
    "lfm2_moe": {**NAMED, "num_dense_layers": 0, "layer_types": ["full_attention", "conv"]},
    "jamba": {
        "num_experts": 4, "use_mamba_kernels": False, "attn_layer_period": 1, "attn_layer_offset": 0,
        "expert_layer_period": 1, "expert_layer_offset": 0,
    },
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32},
}  # fmt: skip
BY_BMM = ("llama4_text",)  # every expert computes every token


def example(family: str, batch: int = LOCAL_BATCH, **fields: Any) -> Example:
    """A model with random weights, and a batch whose sequences have different numbers of targets."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **fields})
    config.use_cache = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).train()
        ids = torch.randint(3, VOCABULARY, (batch, TOKENS))
    labels = ids.clone()
    for row in range(batch):
        labels[row, 1 : 2 + row % 3] = -100
    return randomise(model), {"input_ids": ids, "labels": labels}


def __getattr__(name: str) -> Callable[[], Example]:
    if name not in FAMILIES:
        raise AttributeError(name)
    return partial(example, name)
