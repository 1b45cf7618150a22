"""The plans and the families of the tables of `equivalence.py`."""

from collections.abc import Mapping
from typing import Any

Wish = Mapping[str, Any]
_TOGETHER: Wish = {"tp": 2, "pp": 2, "dp": 2, "zero": 3, "sequence_parallel": True, "recompute": "full"}

MESHES: Mapping[str, Wish] = {
    "tp=2": {"tp": 2},
    "tp=4": {"tp": 4},
    "tp=2 × dp=2, ZeRO 3, sequence": {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
    "dp_replicate=2 × dp_shard=2": {"dp_replicate": 2, "dp_shard": 2},
    "dp=2, accumulate 3": {"dp": 2, "accumulate": 3},
}

# At least four blocks with parameters, two stages of a rank, six micro-batches: legal for every schedule.
PIPELINE_FAMILIES = ("llama", "gpt2", "bert", "t5", "vit", "mixtral")
PIPELINES: Mapping[str, Wish] = {
    "pp=2": {"pp": 2, "micro_batches": 3},
    "pp=4": {"pp": 4, "micro_batches": 3},
    "pp=2, gpipe": {"pp": 2, "schedule": "gpipe", "micro_batches": 6},
    "pp=2, interleaved-1f1b": {"pp": 2, "schedule": "interleaved-1f1b", "micro_batches": 6},
    "pp=2, interleaved-zero-bubble": {
        "pp": 2,
        "schedule": "interleaved-zero-bubble",
        "virtual_stages": 2,
        "micro_batches": 6,
    },
    "pp=2, zbv-zero-bubble": {"pp": 2, "schedule": "zbv-zero-bubble", "micro_batches": 6},
    "pp=2, dualpipev": {"pp": 2, "schedule": "dualpipev", "micro_batches": 6},
    "pp=2, 3 micro-batches twice": {"pp": 2, "micro_batches": 3, "accumulate": 2},
    "tp=2 × pp=2": {"tp": 2, "pp": 2, "micro_batches": 3},
    "pp=2 × dp=2, ZeRO 1": {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 3},
    "pp=2 × dp=2, ZeRO 2": {"pp": 2, "dp": 2, "zero": 2, "micro_batches": 3},
    "pp=2 × dp=2, ZeRO 3": {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 3},
    "tp=2 × pp=2 × dp=2, ZeRO 3, sequence, recompute": {**_TOGETHER, "micro_batches": 2},
}

RECOMPUTED_FAMILIES = ("llama", "gpt2", "mixtral", "t5", "convnext")
RECOMPUTATIONS: Mapping[str, Wish] = {
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "1 block full, 1 selective": {"recompute": "auto", "recompute_blocks": 1, "selective_blocks": 1},
    "selective, tp=2, sequence": {"recompute": "selective", "tp": 2, "sequence_parallel": True},
    "selective, tp=2 × dp=2, ZeRO 1": {"recompute": "selective", "tp": 2, "dp": 2, "zero": 1, "accumulate": 2},
    "selective, tp=2 × dp=2, ZeRO 2": {"recompute": "selective", "tp": 2, "dp": 2, "zero": 2, "accumulate": 2},
    "selective, tp=2 × dp=2, ZeRO 3": {"recompute": "selective", "tp": 2, "dp": 2, "zero": 3, "accumulate": 2},
    "full, tp=2 × dp=2, ZeRO 3": {"recompute": "full", "tp": 2, "dp": 2, "zero": 3, "accumulate": 2},
    "selective, pp=2 × tp=2": {"recompute": "selective", "pp": 2, "tp": 2, "micro_batches": 3},
    "selective, pp=2, interleaved-zero-bubble": {
        "recompute": "selective", "pp": 2, "schedule": "interleaved-zero-bubble", "virtual_stages": 2,
        "micro_batches": 6,
    },
    "stages of their own, pp=2 × dp=2, ZeRO 3": {
        "recompute": "auto", "recompute_blocks": (1, 0), "selective_blocks": (0, 1), "pp": 2, "dp": 2, "zero": 3,
        "micro_batches": 3,
    },
    "selective, 4 chunks of the loss, tp=2": {"recompute": "selective", "tp": 2, "loss_chunks": 4},
}  # fmt: skip

# Of mixtures of experts. A data-parallel rank has 4 sequences.
MIXTURE_PLANS: Mapping[str, Wish] = {
    "tp=2": {"tp": 2},
    "tp=4": {"tp": 4},
    "dp=4, ZeRO 3": {"dp": 4, "zero": 3},
    "tp=2 × dp=2": {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
    "pp=2 × dp=2": {"pp": 2, "dp": 2, "micro_batches": 2},
    "dp=2, accumulate 2, ZeRO 3": {"dp": 2, "accumulate": 2, "zero": 3},
    "dp=2, recompute": {"dp": 2, "recompute": "full"},
}
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "granitemoe", "minimax_m2")
ROUTING_PLANS: Mapping[str, Wish] = {
    "tp=2": {"tp": 2},
    "dp=2, accumulate 2, ZeRO 3": {"dp": 2, "accumulate": 2, "zero": 3},
    "tp=2 × dp=2": {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
    "pp=2, recompute": {"pp": 2, "micro_batches": 2, "recompute": "full"},
}

# Expert ranks, with every way of dispatch
EXPERT_PLANS: Mapping[str, Wish] = {
    "ep=2, exchange": {"dp": 2, "ep": 2, "zero": 3, "dispatch": "exchange"},
    "ep=2, gather": {"dp": 2, "ep": 2, "zero": 3, "dispatch": "gather"},
    "ep=2, whole": {"dp": 2, "ep": 2, "zero": 3, "dispatch": "whole"},
    "ep=4, exchange": {"dp": 4, "ep": 4, "zero": 2, "dispatch": "exchange"},
    "ep=4, gather": {"dp": 4, "ep": 4, "zero": 1, "dispatch": "gather"},
    "dp=2 × ep=2, ZeRO 3": {"dp": 4, "ep": 2, "zero": 3},
    "dp=2 × ep=2, ZeRO 0, gather": {"dp": 4, "ep": 2, "zero": 0, "dispatch": "gather"},
    "ep=2, 2 replicas": {"dp_shard": 2, "ep": 2, "dp_replicate": 2, "zero": 3},
    "ep=2 × tp=2": {"dp": 2, "ep": 2, "tp": 2, "zero": 3, "sequence_parallel": True},
    "ep=2 × tp=2, gather": {"dp": 2, "ep": 2, "tp": 2, "zero": 1, "dispatch": "gather"},
    "ep=2 × pp=2": {"dp": 2, "ep": 2, "pp": 2, "zero": 3, "micro_batches": 2},
    "ep=2 × cp=2": {"dp": 2, "ep": 2, "cp": 2, "zero": 3},
    "ep=2 × cp=2, queries": {"dp": 2, "ep": 2, "cp": 2, "zero": 3, "context": "queries"},
    "ep=2 × cp=2, ring": {"dp": 2, "ep": 2, "cp": 2, "zero": 1, "context": "ring"},
    "ep=2, ZeRO 1, accumulate 2": {"dp": 2, "ep": 2, "zero": 1, "accumulate": 2},
    "ep=2, full": {"dp": 2, "ep": 2, "zero": 3, "recompute": "full"},
    "dp=2 × ep=2, selective": {"dp": 4, "ep": 2, "zero": 3, "recompute": "selective", "accumulate": 2},
}
# Where routing is unusual: experts or whole ranks without a row, odd lengths
EXPERT_ROUTING_PLANS: Mapping[str, Wish] = {
    "ep=2, exchange": {"dp": 2, "ep": 2, "zero": 3, "dispatch": "exchange"},
    "ep=4, exchange": {"dp": 4, "ep": 4, "zero": 1, "dispatch": "exchange"},
    "dp=2 × ep=2, gather": {"dp": 4, "ep": 2, "zero": 3, "dispatch": "gather"},
    "ep=2 × pp=2, full": {"dp": 2, "ep": 2, "pp": 2, "zero": 3, "recompute": "full", "micro_batches": 2},
}

CONTEXT_FAMILIES = (
    *("llama", "mistral", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "falcon_multi_query", "mpt", "bert", "t5"),
    *("mixtral", "qwen3_moe", "decoder", "whisper"),
)
CONTEXT_PLANS: Mapping[str, Wish] = {
    "cp=2": {"cp": 2},
    "cp=4": {"cp": 4},
    "cp=2 × tp=2": {"cp": 2, "tp": 2},
    "cp=2 × dp=2, ZeRO 3": {"cp": 2, "dp": 2, "zero": 3},
    "cp=2 × pp=2": {"cp": 2, "pp": 2, "micro_batches": 3},
    "cp=2, ZeRO 1, selective, accumulate 3": {"cp": 2, "zero": 1, "recompute": "selective", "accumulate": 3},
    "cp=2 × tp=2, sequence, full, 3 chunks": {
        "cp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "recompute": "full",
        "loss_chunks": 3,
    },
}

# Each way of attention, asked for. A window and a mask of padding refuse rings.
CONTEXT_WAY_FAMILIES = (
    *("llama", "qwen3", "gpt2", "gpt_neox", "falcon_multi_query", "falcon_grouped", "mixtral", "qwen3_moe"),
    *("mistral", "bert"),
)
CONTEXT_WAYS: Mapping[str, Wish] = {
    "heads, cp=2": {"cp": 2, "context": "heads"},
    "heads, cp=2 × dp=2, ZeRO 3": {"cp": 2, "dp": 2, "zero": 3, "context": "heads"},
    "queries, cp=2": {"cp": 2, "context": "queries"},
    "queries, cp=4": {"cp": 4, "context": "queries"},
    "queries, cp=2 × tp=2": {"cp": 2, "tp": 2, "context": "queries"},
    "queries, cp=2 × pp=2": {"cp": 2, "pp": 2, "micro_batches": 3, "context": "queries"},
    "ring, cp=2": {"cp": 2, "context": "ring"},
    "ring, cp=4": {"cp": 4, "context": "ring"},
    "ring, cp=2 × tp=2": {"cp": 2, "tp": 2, "context": "ring"},
    "ring, cp=2 × dp=2, ZeRO 3, full": {"cp": 2, "dp": 2, "zero": 3, "recompute": "full", "context": "ring"},
    "ring, cp=2 × pp=2": {"cp": 2, "pp": 2, "micro_batches": 3, "context": "ring"},
    "queries × heads, cp=2 × 2": {"cp_dims": [2, 2], "context": None},
    "ring × heads, cp=2 × 2": {"cp_dims": [2, 2], "context": "ring"},
}

DENSE = ("llama", "gpt2", "gemma2", "mistral", "phi3", "qwen3", "t5")
ODD_PLANS: Mapping[str, Wish] = {
    "tp=2": {"tp": 2},
    "tp=3": {"tp": 3},
    "dp=3, ZeRO 3": {"dp": 3, "zero": 3},
    "tp=2 × dp=2, ZeRO 3": {"tp": 2, "dp": 2, "zero": 3},
    "tp=3 × pp=2": {"tp": 3, "pp": 2, "micro_batches": 3},
}
ONE_SEQUENCE_PLANS: Mapping[str, Wish] = {
    "tp=2": {"tp": 2},
    "pp=2": {"pp": 2, "micro_batches": 1},
    "tp=2 × pp=2, 2 micro-batches": {"tp": 2, "pp": 2, "micro_batches": 2},
    "tp=2, sequence, accumulate 3": {"tp": 2, "sequence_parallel": True, "accumulate": 3},
    "pp=2, 2 micro-batches twice": {"pp": 2, "micro_batches": 2, "accumulate": 2},
}
_CHUNKED: Mapping[str, Wish] = {
    "tp=2": {"tp": 2, "sequence_parallel": False},
    "tp=2, sequence": {"tp": 2, "sequence_parallel": True},
    "dp=2, ZeRO 3": {"dp": 2, "zero": 3},
    "pp=2": {"pp": 2, "micro_batches": 3},
    "tp=2, sequence, recompute": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    "dp=2, accumulate 3": {"dp": 2, "accumulate": 3},
    "tp=2 × pp=2 × dp=2, ZeRO 3, sequence, recompute": {**_TOGETHER, "micro_batches": 3},
}
CHUNK_PLANS: Mapping[str, Wish] = {name: {**wish, "loss_chunks": 3} for name, wish in _CHUNKED.items()}

_OFFLOADED: Mapping[str, Wish] = {
    "one rank, accumulate 2": {"dp": 1, "accumulate": 2},
    "tp=2": {"tp": 2},
    "dp=2, ZeRO 1, accumulate 2": {"dp": 2, "zero": 1, "accumulate": 2},
    "dp=2, ZeRO 2, accumulate 2": {"dp": 2, "zero": 2, "accumulate": 2},
    "dp=2, ZeRO 3, accumulate 2, recompute": {"dp": 2, "zero": 3, "accumulate": 2, "recompute": "full"},
    "pp=2": {"pp": 2, "micro_batches": 3},
    "pp=2, zbv-zero-bubble": {"pp": 2, "schedule": "zbv-zero-bubble", "micro_batches": 6},
    "tp=2 × pp=2 × dp=2, ZeRO 3, sequence, recompute": {**_TOGETHER, "micro_batches": 3},
}
OFFLOADED = ("optimizer", "parameters", "activations", "optimizer+activations", "parameters+activations")
OFFLOAD_PLANS: Mapping[str, Wish] = {
    **{f"{name}: {one}": {**wish, "offload": one} for name, wish in _OFFLOADED.items() for one in OFFLOADED},
    "dp=2, ZeRO 0: optimizer+activations": {"dp": 2, "zero": 0, "offload": "optimizer+activations"},
    "dp=2, ZeRO 0: parameters": {"dp": 2, "zero": 0, "offload": "parameters"},
    **{
        f"tp=2 × dp=2, ZeRO 3, {recompute} recomputation: {one}": {
            "tp": 2,
            "dp": 2,
            "zero": 3,
            "accumulate": 2,
            "recompute": recompute,
            "offload": one,
        }
        for recompute, one in (("selective", "activations"), ("full", "activations"), ("selective", OFFLOADED[-1]))
    },
}
