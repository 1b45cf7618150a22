"""The columns of a published run that a transformers config decides, so that the row path prices a preset too."""

from collections.abc import Mapping
from typing import Any

from autopar.cost_model.row import Row, Unmodelled

_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn_hidden": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "tied_embeddings": ("tie_word_embeddings",),
    "moe_experts": ("num_local_experts", "num_experts"),
    "moe_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden": ("moe_intermediate_size",),
    "moe_shared_ffn": ("shared_expert_intermediate_size",),
}
# decoders whose blocks rows have a family for: the name that tells it, and whether the feed-forward layer is gated
_DECODERS: Mapping[str, tuple[str, bool]] = {
    "gpt2": ("GPT-2", False),
    "opt": ("OPT", False),
    "gpt_neox": ("GPT-NeoX", False),
    "falcon": ("Falcon", False),
    "llama": ("Llama", True),
    "mistral": ("Mistral", True),
    "mixtral": ("Mixtral", True),
    "qwen2": ("Qwen2", True),
    "qwen3": ("Qwen3", True),
    "qwen2_moe": ("Qwen2-MoE", True),
    "qwen3_moe": ("Qwen3-MoE", True),
    "gemma2": ("Gemma 2", True),
    "phi3": ("Phi-3", True),
    "nemotron": ("Nemotron", False),
    "deepseek_v3": ("DeepSeek-V3", True),
}

_ACTIVATIONS = {"gpt_neox": "gelu"}  # one kernel in the family; others are written out operator by operator


def row_of_config(config: Mapping[str, Any], row_id: str, **columns: Any) -> Row | Unmodelled:
    """A row with a config's architecture and the given columns; what columns cannot say is `Unmodelled`, with why."""
    kind = str(config.get("model_type"))
    if kind not in _DECODERS:
        return Unmodelled(id=row_id, reason=f"no family of decoder blocks is of model_type {kind}")
    reason = _beyond_columns(kind, config)
    if reason:
        return Unmodelled(id=row_id, reason=reason)
    found = {
        column: next((config[name] for name in names if config.get(name) is not None), None)
        for column, names in _NAMES.items()
    }
    found["ffn_hidden"] = found["ffn_hidden"] or 4 * (found["hidden"] or 0)
    name, is_gated = _DECODERS[kind]
    if found["moe_experts"] and not found["moe_ffn_hidden"]:
        found["moe_ffn_hidden"] = found["ffn_hidden"]
    return Row(id=row_id, model=name, gated_mlp=is_gated, **{**found, **columns})


def _beyond_columns(kind: str, config: Mapping[str, Any]) -> str:
    """Why no column says what a config says, or nothing."""
    if kind == "falcon" and not config.get("new_decoder_architecture"):
        return "multi-query attention without the second norm of later Falcons is no family"
    if kind == "phi3" and config.get("sliding_window"):
        return "a window that attention slides over has a mask of its own, which the family was captured without"
    written = _ACTIVATIONS.get(kind)
    if written is not None and config.get("hidden_act") not in (None, written):
        return f"the family's activation is {written}, this one's {config['hidden_act']} is other operators"
    return ""
