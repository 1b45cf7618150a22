"""Which family of captured blocks a published row's architecture is of, and the sizes to evaluate it at."""

from dataclasses import replace
from functools import cache
from typing import Any

from autopar.cost_model import expressions
from autopar.cost_model.expressions import Family
from autopar.cost_model.row import Row

# beginnings of model names, lower case, longest first; architectures that columns alone do not tell apart
_NAMED = (
    ("gpt-neox", "gpt-neox"),
    ("deepseek", "deepseek-v3"),
    ("nemotron", "nemotron"),
    ("mixtral", "mixtral"),
    ("falcon", "falcon"),
    ("mistral", "mistral"),
    ("qwen3", "qwen3"),
    ("phi-3", "phi3"),
    ("qwen", "qwen2"),
    ("gemma", "gemma2"),
    ("mpt", "mpt"),
    ("opt", "opt"),
)


def family_name(row: Row) -> str:
    """The family of a row's architecture: by its columns, and by its model's name where they leave it open."""
    shipped = expressions.family_names()
    if row.moe_experts:
        if row.attention_type == "mla":
            return "deepseek-v3"
        return "qwen2-moe" if row.moe_shared_ffn else "mixtral"
    named = next((name for start, name in _NAMED if (row.model or "").lower().startswith(start)), None)
    if named in shipped and (named in ("mpt", "nemotron", "opt", "gpt-neox", "falcon")) == (not row.gated_mlp):
        return named
    if row.gated_mlp:
        return "llama"
    grouped = row.n_kv_heads is not None and row.n_kv_heads != row.n_heads
    return "nemotron" if grouped and "nemotron" in shipped else "gpt2"


@cache
def family_of(name: str) -> Family[Any]:
    """The expressions of a family; a mixture of experts between dense blocks has those of llama."""
    found = expressions.family(name)
    if "moe_layer" in found.roles and "layer" not in found.roles:
        dense = dict(expressions.family("llama").blocks)["layer"]
        found = replace(found, blocks=(*found.blocks, ("layer", dense)))
    return found


def numbers_of(row: Row) -> dict[str, float]:
    """Sizes of a row's model by symbol (`autopar.cost_model.expressions.SYMBOLS`), without those of its layout."""
    heads = float(row.n_heads or 1)
    head = float(row.head_dim or (row.hidden or 0) / heads)
    numbers = {
        "h": row.hidden,
        "a": heads,
        "g": row.n_kv_heads or heads,
        "e": head,
        "f": row.ffn_hidden or 4 * (row.hidden or 0),
        "v": row.vocab,
        "l": row.seq_len,
        "s": row.seq_len,
        "x": row.moe_experts or 1,
        "y": row.moe_topk or 1,
        "m": row.moe_ffn_hidden or row.ffn_hidden or 1,
        "w": row.moe_shared_ffn or 0,
        **LATENT,
    }
    return {name: float(value or 0) for name, value in numbers.items()}


# DeepSeek-V2 and V3 (technical report, section 4.2): ranks of queries and keys, rotated part and value width of a head
LATENT = {"q": 1536.0, "c": 512.0, "r": 64.0, "u": 128.0}
