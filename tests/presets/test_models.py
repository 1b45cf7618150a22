import subprocess
import sys
from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.presets.models import model_names, model_preset, model_presets

REQUIRED = (
    "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3-405b", "gpt2", "gpt2-medium",
    "gpt2-large", "gpt2-xl", "gpt3-175b", "mistral-7b", "qwen2-7b", "qwen3-8b", "gemma2-9b", "phi3-mini", "phi3-medium",
    "gpt-neox-20b", "falcon-7b", "falcon-40b", "mpt-7b", "opt-6.7b", "opt-66b", "bert-large", "roberta-large",
    "vit-l-16", "clip-vit-l-14", "t5-large", "t5-11b", "whisper-large", "mixtral-8x7b",
    "mixtral-8x22b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-20b",
    "gpt-oss-120b", "llama4-scout", "llama4-maverick", "glm-4.5", "kimi-k2", "olmoe-1b-7b",
)  # fmt: skip


def by_formula(config: dict[str, int]) -> int:
    """Parameters of a Llama or a GPT-2 (embeddings tied) from the architecture alone."""
    if "n_embd" in config:
        width = config["n_embd"]
        block = 12 * width * width + 13 * width  # qkv, out, two of 4x; their biases; two norms
        return (config["vocab_size"] + config["n_positions"]) * width + config["n_layer"] * block + 2 * width
    width, ffn = config["hidden_size"], config["intermediate_size"]
    kv_width = width // config["num_attention_heads"] * config["num_key_value_heads"]
    block = 2 * width * width + 2 * width * kv_width + 3 * width * ffn + 2 * width
    return 2 * config["vocab_size"] * width + config["num_hidden_layers"] * block + width


def of_latent_attention(config: dict[str, int]) -> int:
    """Parameters of a DeepSeek-V3 or a Kimi K2 from the architecture alone."""
    width, heads, experts = config["hidden_size"], config["num_attention_heads"], config["n_routed_experts"]
    query_rank, rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    query = config["qk_nope_head_dim"] + rope
    attention = width * query_rank + query_rank + query_rank * heads * query
    attention += width * (rank + rope) + rank + rank * heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
    attention += heads * config["v_head_dim"] * width
    gated = 3 * width * config["moe_intermediate_size"]
    dense, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
    feed_forward = dense * 3 * width * config["intermediate_size"]
    feed_forward += (layers - dense) * ((experts + config["n_shared_experts"]) * gated + experts * width)
    return 2 * config["vocab_size"] * width + layers * (attention + 2 * width) + feed_forward + width


def test_all_models_are_there() -> None:
    assert set(REQUIRED) <= set(model_presets())
    assert len(model_names()) == len(set(model_names()))


def test_listing_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, autopar.presets.models as m; m.model_presets()"
    code += "; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("name", sorted(model_presets()))
def test_counts_agree(name: str) -> None:
    preset = model_presets()[name]
    if preset.config["model_type"] in ("llama", "gpt2"):
        assert preset.num_parameters == by_formula(preset.config)
    if preset.config["model_type"] == "deepseek_v3":
        assert preset.num_parameters == of_latent_attention(preset.config)
    published = preset.published_parameters
    digits = str(published.value)
    half_a_digit = 10 ** (len(digits) - len(digits.rstrip("0"))) / 2 if published.is_rounded else 0
    counted = preset.num_parameters + sum(published.not_built.values())
    assert abs(counted - published.value) <= half_a_digit
    assert all(number > 0 and len(what) > 8 for what, number in published.not_built.items())


@pytest.mark.parametrize("name", sorted(model_presets()))
def test_the_config_builds_with_that_many_parameters(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    preset = model_presets()[name]
    fields = dict(preset.config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    # nothing in the file may be a key that the class does not know and would ignore
    default = type(config)()
    known = {*default.to_dict(), "head_dim"}  # read by attention layers, and so by the count below
    assert all(key in known or hasattr(default, key) for key in fields)
    with torch.device("meta"):
        model = getattr(transformers, preset.config["architectures"][0])(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == preset.num_parameters


@pytest.mark.parametrize("name", sorted(model_presets()))
def test_the_small_form_has_inputs_and_a_loss(name: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from autopar.models.load import resolve_model

    found = resolve_model(name, layers=2, hidden=64, seq_len=16, device="cpu")
    assert [type(found.model).__name__] == model_presets()[name].config["architectures"]
    assert found.num_parameters < 4_000_000
    assert isinstance(found.example_inputs, dict)
    with torch.no_grad():
        loss = found.model(**found.example_inputs).loss
    assert loss.dim() == 0 and bool(torch.isfinite(loss))


def test_the_image_tower_is_what_a_text_model_leaves_out() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # vision_config in the config.json of meta-llama/Llama-4-Scout-17B-16E
    vision = {
        "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
        "image_size": 336, "patch_size": 14, "vision_output_dim": 4096, "projector_input_dim": 4096,
        "projector_output_dim": 4096,
    }  # fmt: skip
    preset = model_preset("llama4-scout")
    fields = {key: value for key, value in preset.config.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        config = transformers.Llama4Config(text_config=fields, vision_config=vision)
        model = transformers.Llama4ForConditionalGeneration(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == preset.published_parameters.value


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="did you mean 'llama3-8b'"):
        model_preset("llama3-8")


def test_the_documentation_has_these_figures() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for name, preset in model_presets().items():
        assert f"| `{name}` |" in text and f"| {preset.num_parameters:,} |" in text
