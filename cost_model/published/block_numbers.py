"""The family of a model and the numbers of its sizes, from the fields of its config; no torch, no transformers.

What a table of runs states of a model (`published_runs.csv`) is less than a config says, but uses the same symbols: the
same expressions are evaluated for both, and for a captured model they equal what its own graph gives.
"""

from collections.abc import Mapping
from typing import Any

from autopar.errors import InputError

FAMILY_OF: Mapping[str, str] = {
    "deepseek_v3": "deepseek-v3",
    "falcon": "falcon",
    "gemma2": "gemma2",
    "gpt2": "gpt2",
    "gpt_neox": "gpt-neox",
    "llama": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "mpt": "mpt",
    "nemotron": "nemotron",
    "opt": "opt",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2-moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3-moe",
}
_KEYS: Mapping[str, tuple[str, ...]] = {
    "h": ("hidden_size", "n_embd", "d_model"),
    "a": ("num_attention_heads", "n_head", "n_heads"),
    "g": ("num_kv_heads", "num_key_value_heads"),
    "e": ("qk_nope_head_dim", "head_dim"),
    "f": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "v": ("vocab_size",),
    "l": ("n_positions", "max_seq_len", "max_position_embeddings"),
    "x": ("num_experts", "num_local_experts", "n_routed_experts"),
    "y": ("num_experts_per_tok",),
    "m": ("moe_intermediate_size",),
    "w": ("shared_expert_intermediate_size",),
    "q": ("q_lora_rank",),
    "c": ("kv_lora_rank",),
    "r": ("qk_rope_head_dim",),
    "u": ("v_head_dim",),
}


def family_of_config(config: Mapping[str, Any]) -> str:
    """The family whose blocks a transformers config has. Raises `InputError` for other models."""
    model_type = str(config.get("model_type"))
    if model_type == "falcon" and not config.get("new_decoder_architecture", False):
        return "falcon-mqa"
    if model_type not in FAMILY_OF:
        raise InputError(f"no blocks of model_type {model_type!r}; there are those of {', '.join(sorted(FAMILY_OF))}")
    return FAMILY_OF[model_type]


def numbers_of_config(config: Mapping[str, Any]) -> dict[str, float]:
    """The sizes of a decoder by symbol, without batch, sequence and degrees. A size the model has not is left out."""
    found: dict[str, float] = {}
    for symbol, keys in _KEYS.items():
        values = [config[key] for key in keys if isinstance(config.get(key), (int, float))]
        if values:
            found[symbol] = float(values[0])
    found.setdefault("g", 1.0 if config.get("multi_query") else found["a"])
    found.setdefault("e", found["h"] / found["a"])
    found.setdefault("f", float(config.get("expansion_ratio", 4)) * found["h"])
    if config.get("model_type") == "mixtral":
        found["m"] = found["f"]
    if "n_shared_experts" in config:
        found["w"] = found["m"] * config["n_shared_experts"]
    if dict(config.get("attn_config") or {}).get("alibi"):
        found["l"] = 0.0  # positions enter as a bias of the scores: no table
    return found


def row_numbers_of_config(config: Mapping[str, Any], *, batch: float, sequence: float, tp: float) -> dict[str, float]:
    """Numbers for every symbol: a micro-batch of `batch` sequences on `tp` tensor ranks. Where ranks outnumber key
    heads, each holds one head of keys and values whole, as if there were as many heads as ranks."""
    found = numbers_of_config(config)
    return {**found, "g": max(found["g"], tp), "b": batch, "s": sequence, "S": sequence, "t": tp}
