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
    "mixtral-8x22b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b",
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
    published = preset.published_parameters
    digits = str(published.value)
    half_a_digit = 10 ** (len(digits) - len(digits.rstrip("0"))) / 2 if published.is_rounded else 0
    assert abs(preset.num_parameters - published.value) <= half_a_digit


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


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="did you mean 'llama3-8b'"):
        model_preset("llama3-8")


def test_the_documentation_has_these_figures() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for name, preset in model_presets().items():
        assert f"| `{name}` |" in text and f"| {preset.num_parameters:,} |" in text
