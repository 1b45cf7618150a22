import subprocess
import sys
from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.presets.models import model_names, model_preset, model_presets

REQUIRED = (
    "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3-405b", "gpt2", "gpt2-medium",
    "gpt2-large", "gpt2-xl", "gpt3-175b",
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
    assert preset.num_parameters == by_formula(preset.config)
    published = preset.published_parameters
    tolerance = 0.005 if published.is_rounded else 0
    assert abs(preset.num_parameters - published.value) <= tolerance * published.value


@pytest.mark.parametrize("name", sorted(model_presets()))
def test_the_config_builds_with_that_many_parameters(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    preset = model_presets()[name]
    fields = dict(preset.config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    # nothing in the file may be a key that the class does not know and would ignore
    assert set(fields) <= set(type(config)().to_dict())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert [type(model).__name__] == preset.config["architectures"]
    assert sum(parameter.numel() for parameter in model.parameters()) == preset.num_parameters


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="did you mean 'llama3-8b'"):
        model_preset("llama3-8")


def test_the_documentation_has_these_figures() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for name, preset in model_presets().items():
        assert f"| `{name}` |" in text and f"| {preset.num_parameters:,} |" in text
