import json
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.presets.configs import check_config, cleaned, read_config, scaled_config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "eos_token_id": [128001, 3],
    "bos_token_id": 1, "attention_dropout": 0.1, "layer_types": ["a", "b"] * 16,
}  # fmt: skip


@pytest.mark.parametrize("hidden", [16, 48, 64, 96, 128, 192, 256, 512])
def test_scaled_sizes_divide(hidden: int) -> None:
    scaled = scaled_config(LLAMA, layers=3, hidden=hidden)
    heads, kv_heads = scaled["num_attention_heads"], scaled["num_key_value_heads"]
    assert scaled["head_dim"] * heads == hidden and scaled["head_dim"] % 2 == 0
    assert kv_heads < heads and heads % kv_heads == 0
    for degree in (2, 4, 8, 3, 6) if hidden % 48 == 0 else (2, 4, 8):
        assert heads % degree == 0 and hidden % degree == 0
        assert scaled["intermediate_size"] % degree == 0 and scaled["vocab_size"] % degree == 0
    assert scaled["num_hidden_layers"] == 3 and scaled["layer_types"] == ["a", "b", "a"]
    assert scaled["attention_dropout"] == 0.0
    assert (scaled["bos_token_id"], scaled["eos_token_id"]) == (1, None)


def test_the_documented_example() -> None:
    scaled = scaled_config(LLAMA, hidden=64)
    keys = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "num_hidden_layers")
    assert [scaled[key] for key in keys] == [8, 4, 224, 512, 32]
    full = scaled_config(LLAMA | {"num_key_value_heads": 32}, hidden=64)
    assert full["num_key_value_heads"] == 8
    single = scaled_config(LLAMA | {"num_key_value_heads": 1}, hidden=64)
    assert single["num_key_value_heads"] == 1


LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_head_dim": 192,
    "head_dim": 64, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280,
}  # fmt: skip


@pytest.mark.parametrize("hidden", [16, 48, 64, 96, 128, 1024])
def test_latent_attention(hidden: int) -> None:
    scaled = scaled_config(LATENT, hidden=hidden)
    heads = scaled["num_attention_heads"]
    assert scaled["v_head_dim"] * heads == scaled["qk_nope_head_dim"] * heads == hidden
    assert scaled["qk_rope_head_dim"] % 2 == 0 and scaled["qk_rope_head_dim"] in (2, hidden // heads // 2)
    assert scaled["head_dim"] == scaled["qk_rope_head_dim"]
    assert scaled["qk_head_dim"] == scaled["qk_nope_head_dim"] + scaled["qk_rope_head_dim"]
    unit = 48 if hidden % 48 == 0 else 16
    assert scaled["q_lora_rank"] % unit == scaled["kv_lora_rank"] % unit == 0
    if hidden == 1024:
        assert (scaled["q_lora_rank"], scaled["kv_lora_rank"]) == (224, 80)
    direct = scaled_config(LATENT | {"q_lora_rank": None}, hidden=hidden)
    assert direct["q_lora_rank"] is None


@pytest.mark.parametrize(
    ("experts", "groups", "chosen", "expected"),
    [(256, 8, 4, (8, 4, 2)), (384, 1, 1, (8, 1, 1)), (160, 8, 3, (8, 4, 2)), (12, 3, 1, (8, 2, 1)),
     (4, 4, 1, (4, 2, 1)), (1, 1, 1, (1, 1, 1))],
)  # fmt: skip
def test_groups_of_experts(experts: int, groups: int, chosen: int, expected: tuple[int, int, int]) -> None:
    scaled = scaled_config(LATENT | {"n_routed_experts": experts, "n_group": groups, "topk_group": chosen}, hidden=64)
    assert (scaled["n_routed_experts"], scaled["n_group"], scaled["topk_group"]) == expected
    assert scaled["num_experts_per_tok"] == 2 and scaled["n_shared_experts"] == 1


@pytest.mark.parametrize(("layers", "dense"), [(1, 0), (2, 1), (4, 2), (6, 3), (122, 3)])
def test_leading_dense_layers_leave_layers_of_experts(layers: int, dense: int) -> None:
    assert scaled_config(LATENT, layers=layers)["first_k_dense_replace"] == dense


def test_chunks_and_layers_by_index() -> None:
    config = LLAMA | {
        "intermediate_size_mlp": 28672, "attention_chunk_size": 8192, "floor_scale": 8192, "sliding_window": None,
        "moe_layers": list(range(1, 32, 2)), "no_rope_layers": [1, 1, 1, 0] * 8,
    }  # fmt: skip
    small = scaled_config(config, layers=6, hidden=64)
    assert (small["attention_chunk_size"], small["floor_scale"], small["sliding_window"]) == (8, 8, None)
    assert (small["intermediate_size_mlp"], small["intermediate_size"]) == (448, 224)
    assert (small["moe_layers"], small["no_rope_layers"]) == ([1, 3, 5], [1, 1, 1, 0, 1, 1])
    more = scaled_config(config | {"moe_layers": [0]}, layers=65)
    assert more["moe_layers"] == [0, 32, 64]


def test_layers_alone_leave_widths_and_vocabulary() -> None:
    scaled = scaled_config(LLAMA, layers=126)
    changed = {key for key in LLAMA if scaled[key] != LLAMA[key]}
    assert changed == {"num_hidden_layers", "layer_types", "attention_dropout"}
    assert len(scaled["layer_types"]) == 126


@pytest.mark.parametrize(("sizes", "hint"), [({"hidden": 50}, "use 48"), ({"hidden": 8192}, "use 4096"),
                                             ({"layers": 0}, "layers"), ({"layers": 10**9}, "layers")])  # fmt: skip
def test_impossible_sizes(sizes: dict[str, int], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        scaled_config(LLAMA, **sizes)


def test_what_a_config_may_not_name() -> None:
    config = {
        "model_type": "llama",
        "quantization_config": {},
        "attn_implementation": "someone/kernel",
        "vocab_size": True,
    }
    assert {problem.path for problem in check_config(config)} == {
        "quantization_config",
        "attn_implementation",
        "vocab_size",
    }
    nested = {
        "auto_map": {},
        "_attn_implementation": "x",
        "text_config": {"_x": 1, "attn_implementation": "x", "dim": 3},
    }
    assert cleaned(nested) == {"text_config": {"dim": 3}}


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": -Infinity}', "[1]", "[" * 100_000, '{"a":' * 100_000, "{", "", "null",
     '{"a": ' + "9" * 5000 + "}", '{"a": "' + "x" * 2_000_000 + '"}'],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_bad_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError):
        read_config(tmp_path / "config.json")


def test_good_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path / "config.json") == LLAMA
