"""The columns of a published run that a transformers config decides: presets are priced as rows too."""

from collections.abc import Mapping
from typing import Any

from autopar.cost_model.published.families import LATENT, WINDOW
from autopar.cost_model.published.row import NoEstimate, Row
from autopar.presets.models import model_presets

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
# decoders whose blocks rows have a family for: the family, and whether the feed-forward layer is gated
_DECODERS: Mapping[str, tuple[str, bool]] = {
    "gpt2": ("gpt2", False),
    "opt": ("opt", False),
    "gpt_neox": ("gpt-neox", False),
    "falcon": ("falcon", False),
    "mpt": ("mpt-torch", False),
    "llama": ("llama", True),
    "mistral": ("mistral", True),
    "mixtral": ("mixtral", True),
    "qwen2": ("qwen2", True),
    "qwen3": ("qwen3", True),
    "qwen2_moe": ("qwen2-moe", True),
    "qwen3_moe": ("qwen3-moe", True),
    "gemma2": ("gemma2", True),
    "phi3": ("phi3", True),
    "nemotron": ("nemotron", False),
    "deepseek_v3": ("deepseek-v3", True),
}

# GPT-NeoX-20B and Pythia differ in how they write gelu: other operators where each is a kernel
_NEOX_ACTIVATIONS = {"gelu_fast": "gpt-neox", "gelu": "pythia", None: "pythia"}
_EVERY_LAYER = ("mistral", "mixtral", "phi3")  # where a config that has a window slides it in all layers


def row_of_config(config: Mapping[str, Any], row_id: str, **columns: Any) -> Row | NoEstimate:
    """A row with a config's architecture and the given columns; what columns cannot say is `NoEstimate`, with why."""
    kind = str(config.get("model_type"))
    if kind not in _DECODERS:
        return NoEstimate(id=row_id, reason=f"no family of decoder blocks is of model_type {kind}")
    reason = _beyond_columns(kind, config, columns.get("seq_len"))
    if reason:
        return NoEstimate(id=row_id, reason=reason)
    found = {
        column: next((config[name] for name in names if config.get(name) is not None), None)
        for column, names in _NAMES.items()
    }
    found["ffn_hidden"] = found["ffn_hidden"] or 4 * (found["hidden"] or 0)
    name, is_gated = _DECODERS[kind]
    if kind == "gpt_neox":
        name = _NEOX_ACTIVATIONS[config.get("hidden_act")]
    if kind == "falcon" and config.get("multi_query") and not config.get("new_decoder_architecture"):
        name, found["n_kv_heads"] = "falcon-mqa", 1
    if kind == "deepseek_v3":
        found["attention_type"] = LATENT
    if _slides(kind, config, columns.get("seq_len")):
        found["attention_type"] = WINDOW
    if found["moe_experts"] and not found["moe_ffn_hidden"]:
        found["moe_ffn_hidden"] = found["ffn_hidden"]
    return Row(id=row_id, family=name, gated_mlp=is_gated, **{**found, **columns})


def _slides(kind: str, config: Mapping[str, Any], sequence: int | None) -> bool:
    """Whether a sequence, by default as long as the model has positions, is longer than what a query may see."""
    window = config.get("sliding_window")
    if not window or kind not in _EVERY_LAYER:
        return False
    return bool((sequence or config.get("max_position_embeddings") or 0) >= window)


def _beyond_columns(kind: str, config: Mapping[str, Any], sequence: int | None) -> str:
    """Why no column says what a config says, or nothing."""
    window = config.get("sliding_window")
    is_slid = config.get("use_sliding_window", kind == "gemma2") and (sequence or 0) >= (window or 0) > 0
    if is_slid and kind not in _EVERY_LAYER:
        return f"a window of {window} slides over some layers only, and a row has one kind of attention"
    if kind == "gpt_neox" and config.get("hidden_act") not in _NEOX_ACTIVATIONS:
        return f"its activation, {config['hidden_act']}, is neither GPT-NeoX-20B's nor Pythia's, and no column names it"
    if kind == "falcon" and not config.get("new_decoder_architecture") and not config.get("multi_query"):
        return "a first Falcon with a key head for every head is no family"
    if config.get("first_k_dense_replace"):
        return "its first layers are dense, and a row of a config has one kind of layer"
    if kind == "falcon" and config.get("alibi"):
        return "positions as a bias of the scores, which no column says"
    return ""


def decoders() -> list[str]:
    """The presets whose blocks are of one stored family."""
    presets = {name: preset.config for name, preset in model_presets().items()}
    return [n for n, c in presets.items() if c["model_type"] in _DECODERS and not c.get("first_k_dense_replace")]
