"""Mixtures of experts of transformers as tiny models, by their config's `model_type`.

``mixtures:name`` is a factory for `autopar.commands.verify.verify`, with sizes and a routing at the end of the name:
``mixtures:name_of_3_by_13`` has 3 sequences of 13 tokens and widths that 3 does not divide,
``mixtures:name_empty_experts`` leaves experts without a token, ``mixtures:name_one_expert`` sends all tokens to one.
Models are in float32, so that experts are multiplied in groups; `verify` and the tests compute in float64.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from zoo import randomise, sizes_of

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
ODD_WIDTHS = {"vocab_size": 61, "intermediate_size": 20, "moe_intermediate_size": 20}  # torch.grouped_mm takes 4 n
EMPTY, ONE = "empty_experts", "one_expert"  # routings


def example(family: str, batch: int = LOCAL_BATCH, tokens: int = TOKENS, **fields: Any) -> Example:
    """A model with random weights, and a batch whose sequences have different numbers of targets."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **fields})
    config.use_cache = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).train()
        ids = torch.randint(3, config.vocab_size, (batch, tokens))
    labels = ids.clone()
    for row in range(batch):
        labels[row, 1 : 2 + row % 3] = -100
    return randomise(model), {"input_ids": ids, "labels": labels}


def routed(family: str, routing: str, **fields: Any) -> Example:
    """A mixture with 8 experts whose tokens leave some of them empty, or all choose the same one, whatever their ids.

    The first channel is large and positive in every token, and routers look at it first.
    """
    model, inputs = example(family, **fields, **({"num_experts_per_tok": 1} if routing == ONE else {}))
    routers = [p for n, p in model.named_parameters() if p.shape == (8, 32) and ("gate" in n or "router" in n)]
    assert routers
    by_first = torch.tensor([2.0] * 4 + [-2.0] * 4) if routing == EMPTY else torch.linspace(0.4, -0.4, 8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.shape == (32,):
                parameter[0] = parameter[0].abs() + 0.5  # of norms
            elif "router.bias" in name:
                parameter.zero_()
        model.get_input_embeddings().weight[:, 0] = 2.0 if routing == EMPTY else 20.0
        for router in routers:
            router[:, 0] = by_first
            router[:, 1:] *= 1.0 if routing == EMPTY else 0.0
    return model, inputs


def __getattr__(name: str) -> Callable[[], Example]:
    for routing in (EMPTY, ONE):
        if name.endswith(f"_{routing}") and name.removesuffix(f"_{routing}") in FAMILIES:
            return partial(routed, name.removesuffix(f"_{routing}"), routing)
    family, batch, tokens = sizes_of(name)
    if family not in FAMILIES:
        raise AttributeError(name)
    widths = ODD_WIDTHS if tokens else {}
    return partial(example, family, batch or LOCAL_BATCH, tokens or TOKENS, **widths)
