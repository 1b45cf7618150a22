"""Write `cost_model/work/families/FAMILY.json`: the work of a block of each family of decoders, as expressions.

    python tools/export_blocks.py            all families
    python tools/export_blocks.py llama      some

Each family is captured as a small bfloat16 model with pairwise distinct sizes. It is labelled on one tensor rank, and
on four with and without sequence parallelism. Sizes become the symbols of `autopar.cost_model.work.block_work`.

Files of the folder over_data are labelled on two data-parallel ranks too, as autopar runs plans. In other frameworks
data-parallel ranks share only the sums of gradients. The tests compare the files with `exported`.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture.request import Request
from autopar.cost_model.work.block_work import ROLES, VARIANTS, BlockWork, Family, to_plain
from autopar.cost_model.work.export import block_works
from autopar.cost_model.work.operator_cost import EXPERT_PRODUCTS
from autopar.cost_model.work.polynomials import Expr, Polynomial, symbol
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.planning.fixed import capture_for, choose_labels

DP = 2
FOLDER = Path(__file__).resolve().parent.parent / "cost_model" / "work" / "families"
# The sizes have the proportions of real models, so they get the same labels. They are pairwise distinct, and so are the
# halves, quarters, sums and quotients that models make of them.
SIZES = {
    "b": 4, "s": 44, "h": 380, "a": 20, "g": 4, "e": 14, "f": 1236, "v": 2020, "l": 68, "x": 8, "y": 3, "m": 248,
    "w": 296, "q": 92, "c": 76, "r": 52, "u": 116,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A family: a transformers config whose values are symbols or numbers, and sizes other than `SIZES`.

    - `symbols` are the family's symbols other than b and s.
    - `rotated` is the part of a head with rotary positions.
    - `names` are sums of symbols that are sizes too.
    - `tp` and `device` are the tensor degree and the device of the labels.
    """

    model_type: str
    config: Mapping[str, Any]
    symbols: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    rotated: Fraction = Fraction(1)
    is_bidirectional: bool = False  # every query meets every key, which a mask of equal values does not show
    names: tuple[tuple[str | int, ...], ...] = ()
    tp: int = 4
    device: str = "a100-80gb"

    def size(self, name: str) -> int:
        return {**SIZES, **self.sizes}[name]


_LLAMA = {
    "hidden_size": "h",
    "intermediate_size": "f",
    "num_attention_heads": "a",
    "num_key_value_heads": "g",
    "head_dim": "e",
    "vocab_size": "v",
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
_LEARNED = {  # learned positions
    "hidden_size": "h",
    "num_attention_heads": "a",
    "vocab_size": "v",
    "max_position_embeddings": "l",
    "num_hidden_layers": 2,
}
_SQUARE = {"h": 280}  # the heads together are as wide as the model: h = a·e
_EQUAL = {"num_key_value_heads": "a"}  # as many key heads as heads, which nobody repeats
_NO_WINDOW = {"sliding_window": None}
_WINDOW = {"sliding_window": 30}  # shorter than the sequence: a mask of its own
_ALIGNED = {"h": 760}  # rows of grouped products are multiples of 16 bytes
# two ways of splitting cost nearly the same, so sizes and machine decide: as published models on two H100
_LABELLED: Mapping[str, Any] = {"tp": 2, "device": "h100-sxm"}
_LONG = {"b": 2, "s": 2044}
_SMALL_EXPERTS = {
    **_LONG,
    "b": 4,
    "h": 2056,
    "a": 16,
    "e": 120,
    "v": 151920,
    "x": 56,
    "y": 5,
    "m": 1400,
    "w": 5600,
}
_MOE = {**_LLAMA, "num_experts": "x", "num_experts_per_tok": "y", "moe_intermediate_size": "m"}
_NEOX = {
    "hidden_size": "h",
    "intermediate_size": "f",
    "num_attention_heads": "a",
    "vocab_size": "v",
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
_NEOX_SIZES: Mapping[str, Any] = {"symbols": "haefv", "sizes": {"h": 800, "e": 40}, "rotated": Fraction(1, 4)}
CAPTURES: Mapping[str, Capture] = {
    "gpt2": Capture(
        model_type="gpt2",
        config={"n_embd": "h", "n_inner": "f", "n_head": "a", "vocab_size": "v", "n_positions": "l", "n_layer": 2},
        symbols="haefvl",
        sizes=_SQUARE,
    ),
    "bert": Capture(
        model_type="bert",
        config={**_LEARNED, "intermediate_size": "f"},
        symbols="haefvl",
        sizes=_SQUARE,
        is_bidirectional=True,
    ),
    "opt": Capture(
        model_type="opt",
        config={**_LEARNED, "word_embed_proj_dim": "h", "ffn_dim": "f"},
        symbols="haefvl",
        sizes=_SQUARE,
        names=(("l", 2),),
    ),
    "llama": Capture(model_type="llama", config=_LLAMA, symbols="hagefv"),
    "llama-mha": Capture(model_type="llama", config={**_LLAMA, **_EQUAL}, symbols="haefv"),
    "mistral": Capture(model_type="mistral", config={**_LLAMA, **_NO_WINDOW}, symbols="hagefv"),
    "mistral-window": Capture(model_type="mistral", config={**_LLAMA, **_WINDOW}, symbols="hagefv"),
    "qwen2": Capture(model_type="qwen2", config=_LLAMA, symbols="hagefv"),
    "qwen3": Capture(model_type="qwen3", config=_LLAMA, symbols="hagefv"),
    "gemma2": Capture(model_type="gemma2", config=_LLAMA, symbols="hagefv"),
    "phi3": Capture(model_type="phi3", config={**_LLAMA, **_NO_WINDOW}, symbols="hagefv", sizes=_SQUARE),
    "phi3-mha": Capture(model_type="phi3", config={**_LLAMA, **_EQUAL, **_NO_WINDOW}, symbols="haefv", sizes=_SQUARE),
    "phi3-window": Capture(model_type="phi3", config={**_LLAMA, **_WINDOW}, symbols="hagefv", sizes=_SQUARE),
    "phi3-mha-window": Capture(
        model_type="phi3", config={**_LLAMA, **_EQUAL, **_WINDOW}, symbols="haefv", sizes=_SQUARE
    ),
    "nemotron": Capture(
        model_type="nemotron", config=_LLAMA, symbols="hagefv", sizes={"e": 28}, rotated=Fraction(1, 2)
    ),
    "falcon": Capture(
        model_type="falcon",
        config={
            "hidden_size": "h",
            "ffn_hidden_size": "f",
            "num_attention_heads": "a",
            "num_kv_heads": "g",
            "vocab_size": "v",
            "num_hidden_layers": 2,
            "new_decoder_architecture": True,
        },
        symbols="hagefv",
        sizes={**_LONG, "h": 8160, "a": 120, "g": 8, "e": 68, "f": 32600, "v": 65020},
        names=(("a/g", 2),),
        **_LABELLED,
    ),
    "falcon-mqa": Capture(
        model_type="falcon",
        config={
            "hidden_size": "h",
            "ffn_hidden_size": "f",
            "num_attention_heads": "a",
            "vocab_size": "v",
            "num_hidden_layers": 2,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
        },
        symbols="haefv",
        sizes={**_LONG, "h": 4828, "a": 71, "e": 68, "f": 19300, "v": 65020},  # heads that nothing divides
        names=(("a", 2),),
        **_LABELLED,
    ),
    "gpt-neox": Capture(model_type="gpt_neox", config={**_NEOX, "hidden_act": "gelu_fast"}, **_NEOX_SIZES),
    "pythia": Capture(model_type="gpt_neox", config=_NEOX, **_NEOX_SIZES),
    "mpt": Capture(model_type="llm-foundry", config={}, symbols="haefvl", sizes=_SQUARE),
    "mpt-torch": Capture(
        model_type="mpt",
        config={
            "d_model": "h",
            "n_heads": "a",
            "n_layers": 2,
            "max_seq_len": "l",
            "vocab_size": "v",
            "expansion_ratio": 4,
            "attn_config": {"attn_impl": "torch", "alibi": True},
        },
        symbols="haefvl",
        sizes={"a": 32, "h": 448, "f": 1792},  # slopes of a power of two heads, as published models have
    ),
    "mixtral": Capture(
        model_type="mixtral",
        config={**_LLAMA, "intermediate_size": "m", "num_local_experts": "x", "num_experts_per_tok": "y"},
        symbols="hagevxym",
        sizes={**_ALIGNED, "m": 2488},
    ),
    "qwen2-moe": Capture(
        model_type="qwen2_moe",
        config={**_MOE, "shared_expert_intermediate_size": "w"},
        symbols="hagevxymw",
        sizes={**_SMALL_EXPERTS, "a": 24},
        **_LABELLED,
    ),
    "qwen2-moe-mha": Capture(
        model_type="qwen2_moe",
        config={**_MOE, **_EQUAL, "shared_expert_intermediate_size": "w"},
        symbols="haevxymw",
        sizes=_SMALL_EXPERTS,
        **_LABELLED,
    ),
    "qwen3-moe": Capture(
        model_type="qwen3_moe",
        config={**_MOE, "norm_topk_prob": True},
        symbols="hagevxym",
        sizes={**_SMALL_EXPERTS, "h": 2088, "a": 32, "e": 136, "x": 120, "y": 6, "m": 776},
        **_LABELLED,
    ),
    "deepseek-v3": Capture(
        model_type="deepseek_v3",
        config={
            "hidden_size": "h",
            "intermediate_size": "f",
            "num_attention_heads": "a",
            "num_key_value_heads": "a",
            "vocab_size": "v",
            "n_routed_experts": "x",
            "num_experts_per_tok": "y",
            "moe_intermediate_size": "m",
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": "q",
            "kv_lora_rank": "c",
            "qk_rope_head_dim": "r",
            "qk_nope_head_dim": "e",
            "v_head_dim": "u",
            "first_k_dense_replace": 2,
            "num_hidden_layers": 4,
            "max_position_embeddings": 64,
        },
        symbols="haefvxymwqcru",
        sizes={**_ALIGNED, "w": 496},
        names=(
            ("e", "r"),
            ("c", "r"),
            ("e", "u"),
        ),
    ),
}


def by_size(capture: Capture, dp: int = 1) -> dict[int, Expr]:
    """The expression of each captured size.

    Sizes are symbols, rotated parts of a head, queries per key head, s + 1 labels, tokens, and rows of experts.
    """
    found: dict[int, Expr] = {}

    def name(size: int, what: Expr) -> None:
        if size <= 2:
            raise ValueError(f"{capture.model_type}: {what} has size {size}, which factors have too; choose another")
        if found.setdefault(size, what) != what:
            raise ValueError(f"{capture.model_type}: size {size} is both {found[size]} and {what}; choose other sizes")

    for each in ("s", *capture.symbols):  # the batch is known by its axis
        name(capture.size(each), symbol(each))
    if "r" in capture.symbols:
        name(capture.size("r") // 2, symbol("r") / 2)
    else:
        width, rotated = capture.size("e"), capture.rotated
        for part in {rotated, rotated / 2, 1 - rotated} - {Fraction(0)}:
            name(int(width * part), symbol("e") * part.numerator / part.denominator)
    if "g" in capture.symbols:
        name(capture.size("a") // capture.size("g"), symbol("a") / symbol("g"))
    name(capture.size("s") + 1, symbol("s") + 1)
    tokens, rows = capture.size("b") * capture.size("s") * dp, symbol("b") * symbol("s")
    rows *= symbol("d") if dp > 1 else 1
    name(tokens, rows)
    if "y" in capture.symbols:
        name(tokens * capture.size("y"), rows * symbol("y"))
    for parts in capture.names:
        pairs = [_quotient(capture, part) if isinstance(part, str) else (part, part) for part in parts]
        name(sum(size for size, _ in pairs), sum((what for _, what in pairs), start=symbol("b") * 0))
    return found


def _quotient(capture: Capture, text: str) -> tuple[int, Expr]:
    """Size and expression of ``a`` or ``a/g``."""
    above, _, below = text.partition("/")
    if not below:
        return capture.size(above), symbol(above)
    return capture.size(above) // capture.size(below), symbol(above) / symbol(below)


class MptBlock(nn.Module):
    """A layer of MPT as llm-foundry trains it, with attention in one kernel; transformers has it in pieces only."""

    def __init__(self, h: int, a: int, f: int) -> None:
        super().__init__()
        self.heads = a
        self.norm_1, self.norm_2 = nn.LayerNorm(h, bias=False), nn.LayerNorm(h, bias=False)
        self.Wqkv, self.out_proj = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.up_proj, self.down_proj = nn.Linear(h, f, bias=False), nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, h) -> (b, s, h)"""
        parts = self.Wqkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))
        return out


class Mpt(nn.Module):
    """MPT with learned positions and a tied head (mosaicml/llm-foundry, `llmfoundry/models/mpt/modeling_mpt.py`)."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        h, a, f, v, positions = (capture.size(name) for name in "hafvl")
        self.wte, self.wpe = nn.Embedding(v, h), nn.Embedding(positions, h)
        self.blocks = nn.ModuleList(MptBlock(h, a, f) for _ in range(2))
        self.norm_f = nn.LayerNorm(h, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Token ids and targets, (b, s) -> mean loss"""
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm_f(x), self.wte.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def model_of(capture: Capture) -> nn.Module:
    """A family's model on meta, in bfloat16 and training mode."""
    import transformers

    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        if capture.model_type == "llm-foundry":
            return Mpt(capture).to(torch.bfloat16).train()
        sizes = {key: capture.size(value) if isinstance(value, str) and value in SIZES else value
                 for key, value in capture.config.items()}  # fmt: skip
        tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
        config = transformers.CONFIG_MAPPING[capture.model_type](**sizes, **tokens)
        config.use_cache = False
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return model.train()


def captured(capture: Capture, dp: int = 1) -> Program:
    """The captured model of a family, at the micro-batch of all data-parallel ranks."""
    ids = torch.empty(capture.size("b"), capture.size("s"), dtype=torch.long, device="meta")
    degrees = Degrees(tp=capture.tp, dp_shard=dp, micro_batch=capture.size("b"))
    return capture_for(Request.of(model_of(capture), {"input_ids": ids, "labels": ids.clone()}), degrees)


def exported(name: str, *, over_data: bool = False) -> Family[Polynomial]:
    """The expressions of a family, captured anew; `over_data`: labelled over data-parallel ranks too.

    Raises `ValueError` if its blocks are not a decoder's.
    """
    capture, dp = CAPTURES[name], DP if over_data else 1
    program = captured(capture, dp)
    roles, sizes = roles_of(name, program), by_size(capture, dp)
    found: dict[str, list[tuple[str, BlockWork[Polynomial]]]] = {}
    for variant in VARIANTS:
        tp = 1 if variant == "one" else capture.tp
        degrees = Degrees(tp=tp, dp_shard=dp, micro_batch=capture.size("b"), sequence_parallel=variant == "sp")
        cluster = ClusterSpec.parse(f"{tp * dp}x{capture.device}")
        degrees, analysis, labelling = choose_labels(program, cluster, degrees)
        works = tuple(
            replace(
                work,
                sent=tuple(one for one in work.sent if not one.is_once_a_step),
                products=tuple(
                    replace(op, sees="all") if capture.is_bidirectional and op.kind == "attention" else op
                    for op in work.products
                ),
            )
            for work in block_works(program, analysis, labelling.blocks, degrees.mesh, by_size=sizes)
        )
        for index, role in roles.items():
            earlier = dict(found.get(role, ())).get(variant)
            if earlier is None:
                found.setdefault(role, []).append((variant, replace(works[index], role=role)))
    blocks = tuple((role, tuple(found[role])) for role in ROLES if role in found)
    source = "llm-foundry mpt" if name == "mpt" else f"transformers {capture.model_type}"
    return Family(name=name, source=f"{source}, bfloat16", blocks=blocks)


def roles_of(name: str, program: Program) -> dict[int, str]:
    """The role of each distinct block: before the layers, a dense layer, an expert layer, or after the layers."""
    found: dict[int, str] = {}
    for call in program.calls:
        if call.phase == "denominator":
            continue
        if call.path in ("prologue", "epilogue"):
            found[call.block] = "first" if call.path == "prologue" else "last"
        else:
            targets = {str(node.target) for node in program.blocks[call.block].graph.nodes}
            found[call.block] = (
                "moe_layer" if any(name in target for target in targets for name in EXPERT_PRODUCTS) else "layer"
            )
    if sorted(set(found.values()) - {"moe_layer"}) not in (["first", "last", "layer"], ["first", "last"]):
        raise ValueError(f"{name}: blocks {[block.name for block in program.blocks]} are not those of a decoder")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("families", nargs="*", default=list(CAPTURES), help=", ".join(CAPTURES))
    logging.disable(logging.WARNING)
    for name in parser.parse_args().families:
        for over_data in (False, True):
            text = lines(to_plain(exported(name, over_data=over_data)), "") + "\n"
            file_of(name, over_data=over_data).write_text(text, encoding="utf-8")
            print(f"{name}{' over data' if over_data else ''}: {len(text) / 1024:.0f} KiB", flush=True)


def lines(value: Any, indent: str) -> str:
    """JSON with one line per operator, so that a change of a family can be read."""
    records = {"kernels_forward", "is_forward"}  # keys of the objects that stand in one line
    text = json.dumps(value, ensure_ascii=False)
    deep = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    deep = deep or (isinstance(value, dict) and not records & set(value))
    if len(text) + len(indent) <= 118 or not deep:
        return text
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(k)}: {lines(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + lines(v, inner) for v in value) + f"\n{indent}]"


def file_of(name: str, *, over_data: bool) -> Path:
    return (FOLDER / "over_data" if over_data else FOLDER) / f"{name}.json"


if __name__ == "__main__":
    main()
