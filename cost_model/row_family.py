"""Which family of captured blocks a published row's architecture is of, and the sizes to evaluate it at."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from autopar.cost_model import expressions
from autopar.cost_model.expressions import SYMBOLS, Family
from autopar.cost_model.layout import Layouts, Shape
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


def numbers_at(numbers: Mapping[str, Any], layouts: Layouts, names: Collection[str] = tuple(SYMBOLS)) -> dict[str, Any]:
    """Those `names` of a model's numbers (`numbers_of`), or of one model per layout, that a rank of the layouts has."""
    keys = numbers["s"]
    found = {name: numbers[name] for name in names if name in numbers}
    of_layouts: dict[str, Callable[[], Any]] = {
        "b": lambda: layouts.micro_batch,
        "t": lambda: layouts.tp,
        "S": lambda: keys,
        "s": lambda: keys / layouts.cp,
        "g": lambda: np.maximum(numbers["g"], layouts.tp),  # fewer key heads than ranks are held several times
    }
    return found | {name: value() for name, value in of_layouts.items() if name in names}


def shape_of(rows: Sequence[Row]) -> Shape:
    """What of rows' models their families do not say, one entry each."""

    def column(value: Callable[[Row], Any]) -> Any:
        return np.array([float(value(row)) for row in rows])

    def expert_blocks(row: Row) -> int:
        return (row.moe_layers or row.layers or 0) if row.moe_experts else 0

    return Shape(
        counts=(
            ("layer", column(lambda row: (row.layers or 0) - expert_blocks(row))),
            ("moe_layer", column(expert_blocks)),
        ),
        hidden=column(lambda row: row.hidden),
        sequence=column(lambda row: row.seq_len),
        experts_per_token=column(lambda row: row.moe_topk or 1),
        is_tied=column(lambda row: bool(row.tied_embeddings)) > 0,
    )
