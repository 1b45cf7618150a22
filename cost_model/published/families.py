"""The family of captured blocks that a published row's architecture belongs to, and the sizes to evaluate it at."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np

from autopar.cost_model.published.row import Row
from autopar.cost_model.step.experts import has_experts, is_expert_product
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.work import block_work as expressions
from autopar.cost_model.work.block_work import Family
from autopar.ir.arrays import Floats
from autopar.ir.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OwnPart
from autopar.ir.precision import MASTER_BYTES
from autopar.ir.sharding import owned_by

WINDOW = "swa"  # of `attention_type`: sliding windows that are shorter than the sequence
LATENT = "mla"  # of `attention_type`


def family_name(row: Row) -> str:
    """The family that a row names, or the usual one of its columns, in the variant of its heads and windows."""
    keys = row.n_kv_heads or row.n_heads
    if row.moe_experts and row.attention_type == LATENT:
        return "deepseek-v3"
    if row.moe_experts:
        usual = "qwen2-moe" if row.moe_shared_ffn else "mixtral"
    else:
        usual = "llama" if row.gated_mlp else "gpt2" if keys == row.n_heads else "nemotron"
    name = row.family or usual
    end = "-mha" if keys == row.n_heads else ""
    variants = (f"{name}{end}-window", f"{name}-window") if row.attention_type == WINDOW else ()
    return next((n for n in (*variants, f"{name}{end}") if n in expressions.family_names()), name)


@cache
def family_of(name: str, variant: Literal["one", "tp", "sp"], *, over_data: bool = False) -> Family[Any]:
    """The expressions of a family on one tensor rank, on several, or on several with sequence parallelism."""
    base = expressions.family(name, over_data=over_data)
    if "moe_layer" in base.roles and "layer" not in base.roles:
        dense = dict(expressions.family("llama", over_data=over_data).blocks)["layer"]
        base = replace(base, blocks=(*base.blocks, ("layer", dense)))
    works = ((role, dict(variants)[variant]) for role, variants in base.blocks)
    return replace(base, blocks=tuple((role, tuple((each, work) for each in ("tp", "sp"))) for role, work in works))


def with_expert_ranks(family: Family[Any], at_etp: Family[Any], layouts: Layouts, keeps: Floats) -> Family[Any]:
    """The family if `etp` of the tensor ranks split an expert, and the others hold other experts.

    Such ranks work on different tokens. So the products of experts have 1/(tp/etp) of the rows, and the widths of etp
    ranks. The experts of a rank are as many and tp/etp times as large.
    """
    others = {role: dict(variants) for role, variants in at_etp.blocks}

    def of_block(role: str, variant: str, work: Any) -> Any:
        if not has_experts(role):
            return work
        other = others[role][variant]
        products = tuple(
            replace(there, m=there.m / layouts.expert_replicas) if is_expert_product(op) else op
            for op, there in zip(work.products, other.products, strict=True)
        )
        sent = tuple(
            replace(sent, whole_bytes=sent.whole_bytes * keeps) if owned_by(sent.mesh_dim) == "parameters" else sent
            for sent in work.sent
        )
        return replace(work, products=products, sent=sent, parameters_expert=other.parameters_expert)

    return family.with_works(of_block)


def with_head(family: Family[Any], row: Row) -> Family[Any]:
    """The family with the head of a row. A small one, of classes or of a few masked tokens, counts as nothing."""
    if row.head != "small":
        return family

    def without(work: Any) -> Any:
        none = np.zeros(1)
        bare = replace(work, products=(), eager=(), fused=(), sent=(), parameters_split=none, parameters_whole=none)
        return replace(bare, saved_eager_bytes=none, saved_fused_bytes=none, saved_operand_bytes=none)

    return family.with_works(lambda role, _, work: without(work) if role == "last" else work)


def in_precision(family: Family[Any], row: Row) -> Family[Any]:
    """The family, whose bytes are of 16 bits, in the precision of a row: float32 has twice the bytes."""
    if row.precision != "fp32":
        return family

    def wide(work: Any) -> Any:
        moved = {
            name: tuple(
                replace(op, forward_bytes=2 * op.forward_bytes, backward_bytes=2 * op.backward_bytes)
                for op in getattr(work, name)
            )
            for name in ("eager", "fused")
        }
        sent = tuple(replace(each, whole_bytes=2 * each.whole_bytes) for each in work.sent)
        held = ("saved_eager_bytes", "saved_fused_bytes", "saved_operand_bytes", "input_bytes")
        return replace(work, **moved, sent=sent, **{name: 2 * getattr(work, name) for name in held})

    return family.with_works(lambda _role, _variant, work: wide(work))


def sizes_of_row(row: Row) -> dict[str, float]:
    """Sizes of a row's model by symbol (`autopar.cost_model.work.block_work.SYMBOLS`), without sizes of its layout."""
    is_latent = row.attention_type == LATENT
    heads = float(row.n_heads or 1)
    head = float(row.head_dim or (LATENT_HEAD if is_latent else (row.hidden or 0) / heads))
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
    }
    if is_latent:
        numbers |= {symbol: part * head for symbol, part in LATENT_PARTS.items()}
    return {name: float(value or 0) for name, value in numbers.items()}


def numbers_at(numbers: Mapping[str, Any], layouts: Layouts) -> dict[str, Any]:
    """The numbers of a model (`sizes_of_row`), or of one model per layout, that a rank of the layouts has."""
    return {
        **numbers,
        "b": layouts.micro_batch,
        "t": layouts.tp,
        "d": layouts.dp,
        "S": numbers["s"],
        "s": numbers["s"] / layouts.cp,
        "g": np.maximum(numbers["g"], layouts.tp),  # fewer key heads than ranks are held several times
    }


def shape_of_rows(rows: Sequence[Row]) -> Shape:
    """Facts of the rows' models that their families do not contain, one entry per row."""

    def column(value: Callable[[Row], Any]) -> Any:
        return np.array([float(value(row)) for row in rows])

    first = rows[0]
    element = _BYTES.get(first.precision or "", 2.0)
    stored = float(MASTER_BYTES) if first.stored is None else _BYTES.get(first.stored, 2.0)

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
        element_bytes=element,
        stored_bytes=stored,
        moment_bytes=_moment_bytes(first.optimizer_state or DEFAULT_OPTIMIZER, int(stored)),
    )


def _moment_bytes(optimizer: str, stored_bytes: int) -> float:
    """Bytes of an optimizer's state of one element of a large matrix."""
    part = OwnPart(shape=(4096, 4096), num_elements=1 << 24, element_bytes=stored_bytes, is_hidden=True)
    return OPTIMIZERS[optimizer].state_bytes(part) / part.num_elements


_BYTES = {"fp32": 4.0}  # of an element; 2 in all other precisions


# No column has the ranks of latent attention. DeepSeek-V2 (arXiv 2405.04434, section 3.1.2) chose 1536 for queries and
# 512 for keys and values, with a rotated part of 64 and heads of 128; V3 (arXiv 2412.19437, section 4.2) kept them.
# They are scaled with the head.
LATENT_HEAD = 128.0
LATENT_PARTS = {"q": 12.0, "c": 4.0, "r": 0.5, "u": 1.0}
