import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from autopar.errors import InputError  # noqa: E402
from autopar.models.example_inputs import example_inputs_for  # noqa: E402
from autopar.models.load import ResolvedModel, in_storage, resolve_model  # noqa: E402


def write_config(folder: Path, **fields: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def loss_of(spec: str, **options: Any) -> float:
    resolved = resolve_model(spec, device="cpu", seq_len=8, layers=2, hidden=64, **options)
    loss: float = resolved.model(**resolved.example_inputs).loss.item()
    return loss


def test_preset_on_meta() -> None:
    resolved = resolve_model("llama3-8b", batch=3, seq_len=16)
    assert (resolved.kind, resolved.num_parameters) == ("preset", 8_030_261_248)
    assert all(parameter.is_meta for parameter in resolved.model.parameters())
    assert resolved.model.training and not resolved.model.config.use_cache
    inputs = resolved.example_inputs
    assert isinstance(inputs, dict) and list(inputs) == ["input_ids", "labels"]
    assert inputs["input_ids"] is not inputs["labels"]
    assert all(t.is_meta and t.dtype == torch.int64 and t.shape == (3, 16) for t in inputs.values())


@pytest.mark.parametrize(("spec", "seq_len"), [("llama3-405b", 4096), ("gpt2", 1024), ("Llama2_7b", 4096)])
def test_default_sizes(spec: str, seq_len: int) -> None:
    inputs = resolve_model(spec).example_inputs
    assert isinstance(inputs, dict) and all(t.shape == (2, seq_len) for t in inputs.values())


@pytest.mark.parametrize("spec", ["llama3-8b", "llama2-7b", "gpt2", "gpt3-175b"])
@pytest.mark.parametrize("hidden", [64, 96])
def test_scaled_presets_train(spec: str, hidden: int) -> None:
    resolved = resolve_model(spec, layers=2, hidden=hidden, seq_len=8, dtype="float64", device="cpu")
    assert all(parameter.dtype == torch.float64 for parameter in resolved.model.parameters())
    dropouts = [m.p for m in resolved.model.modules() if isinstance(m, torch.nn.Dropout)]
    assert not any(dropouts) and "dropout is 0" in resolved.notes[0]
    resolved.model(**resolved.example_inputs).loss.backward()
    assert all(parameter.grad is not None for parameter in resolved.model.parameters())


def test_unscaled_models_keep_their_dropout() -> None:
    assert any(m.p == 0.1 for m in resolve_model("gpt2").model.modules() if isinstance(m, torch.nn.Dropout))


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("BertForMaskedLM", "bert"), ("BertForSequenceClassification", "bert"), ("ViTForImageClassification", "vit"),
     ("T5ForConditionalGeneration", "t5"), ("GPTNeoXForCausalLM", "gpt_neox"), ("Qwen3ForCausalLM", "qwen3")],
)  # fmt: skip
def test_other_architectures(tmp_path: Path, architecture: str, model_type: str) -> None:
    spec = write_config(tmp_path, model_type=model_type, architectures=[architecture])
    resolved = resolve_model(spec, device="cpu", layers=2, hidden=64)
    assert type(resolved.model).__name__ == architecture
    assert resolved.model(**example_inputs_for(resolved.model, batch=2, seq_len=8)).loss.item() > 0


def test_mixture_of_experts_in_float64(tmp_path: Path) -> None:
    spec = write_config(tmp_path, model_type="mixtral", architectures=["MixtralForCausalLM"])
    assert loss_of(spec, dtype="float64") > 0


def test_config_folder_and_dtype(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="llama", num_hidden_layers=1, torch_dtype="bfloat16", foo=3)
    resolved = resolve_model(str(tmp_path), dtype=torch.float16)
    assert (resolved.kind, resolved.name, resolved.model.dtype) == ("config", tmp_path.name, torch.float16)
    assert "foo" in resolved.notes[0]
    assert resolve_model(str(tmp_path)).model.dtype == torch.float32  # stored weights' dtype is not the training dtype


def test_all_problems_of_a_config_at_once(tmp_path: Path) -> None:
    spec = write_config(
        tmp_path,
        model_type="llama",
        num_hiden_layers=3,
        hidden_size=True,
        vocab_size="x",
        rms_norm_eps="y",
        hidden_act=3,
    )
    with pytest.raises(InputError) as caught:
        resolve_model(spec)
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"num_hiden_layers", "hidden_size", "vocab_size", "rms_norm_eps", "hidden_act"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({}, "model_type"),
        ({"model_type": "llama", "num_attention_heads": 33}, "not a multiple"),
        ({"model_type": "llama", "hidden_act": "nope", "num_hidden_layers": 1}, "cannot|can be built"),
        ({"model_type": "llama", "attn_implementation": "someone/kernel"}, "nothing is fetched"),
    ],
)
def test_bad_configs(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_model(write_config(tmp_path, **fields))


def test_remote_code_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    resolved = resolve_model(write_config(tmp_path, model_type="llama", num_hidden_layers=1, auto_map=code))
    assert type(resolved.model).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("llama3-8", {}, "did you mean 'llama3-8b'"),
        ("/nope/config.json", {}, "no such file"),
        ("gpt2", {"seq_len": 2000}, "use 1024 or less"),
        ("gpt2", {"dtype": "flaot32"}, "did you mean 'float32'"),
        ("gpt2", {"device": "xpx"}, "unknown to torch"),
        ("gpt2", {"batch": 0, "layers": True}, "layers: must be"),
        ("gpt2", {"hidden": 50}, "use 48"),
        ("no_such.module:factory", {}, "no module named 'no_such'"),
        ("json:dumpss", {}, "did you mean 'dumps'"),
        ("json:decoder", {}, "is a module"),
        ("a/b.py:f", {}, "there is no file a/b.py"),
        ("b.py;x:f", {}, "package.module:factory"),
        ("json:dumps", {"layers": 2}, "decides its own sizes"),
    ],
)
def test_bad_specs(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_model(spec, **options)


FACTORIES = """
import torch

def good():
    return torch.nn.Linear(4, 2), (torch.zeros(3, 4),)

def named():
    return torch.nn.Linear(4, 2), {"input": torch.zeros(3, 4)}

def raises():
    raise RuntimeError("boom")

def one_thing():
    return torch.nn.Linear(4, 2)

def no_module():
    return 3, (torch.zeros(3),)

def no_inputs():
    return torch.nn.Linear(4, 2), [torch.zeros(3)]

def no_tensor():
    return torch.nn.Linear(4, 2), {"input": 3}
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"factories_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    return name


def test_factory(factories: str) -> None:
    resolved = resolve_model(f"{factories}:good")
    assert resolved.kind == "factory" and isinstance(resolved.example_inputs, tuple)
    resolved = resolve_model(f"{factories}:named", dtype="float64")
    assert isinstance(resolved.example_inputs, dict)
    assert resolved.example_inputs["input"].dtype == next(resolved.model.parameters()).dtype == torch.float64


def test_factory_of_a_file(factories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "01-model.py").write_text(f"from {factories} import good\n")  # beside the file, and no name of a module
    for spec in (f"../{factories}.py:good", f"{tmp_path}/01-model.py:good"):
        assert resolve_model(spec).kind == "factory"
    first, second = (type(resolve_model(f"../{factories}.py:named").model) for _ in range(2))
    assert first is second
    with pytest.raises(InputError, match="did you mean 'good'"):
        resolve_model(f"../{factories}.py:god")
    with pytest.raises(InputError, match=f"such as ../{factories}.py:factory"):
        resolve_model(f"../{factories}.py")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (":raises", r"raised RuntimeError: boom \(.*\.py:11\)"),
        (":one_thing", "it returned a Linear"),
        (":no_module", "model: must be a torch.nn.Module; got 'a int'"),
        (":no_inputs", "example_inputs: must be a dict or a tuple; got 'a list of 1'"),
        (":no_tensor", "at least one tensor"),
        (":god", "did you mean 'good'"),
        ("_broken:good", "no_such_dependency"),
    ],
)
def test_bad_factories(factories: str, factory: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_model(factories + factory)


def test_inputs_that_cannot_be_derived() -> None:
    with pytest.raises(InputError, match="pass example_inputs"):
        example_inputs_for(torch.nn.Linear(2, 2))
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=9)
    with pytest.raises(InputError, match="takes no labels"):
        example_inputs_for(LlamaModel(config))


def test_inputs_on_a_real_device_are_seeded_and_in_range() -> None:
    model = resolve_model("gpt2", layers=1, hidden=64, device="cpu").model
    first, second = example_inputs_for(model, 2, 8), example_inputs_for(model, 2, 8)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["input_ids"], first["labels"])
    assert int(first["input_ids"].min()) >= 0 and int(first["input_ids"].max()) < 512


def test_complex_weights_and_inputs_keep_their_imaginary_parts() -> None:
    model = torch.nn.ParameterDict({"w": torch.randn(3, dtype=torch.complex64), "v": torch.randn(3)})
    model.register_buffer("phase", torch.randn(3, dtype=torch.complex128))
    inputs = {"x": torch.randn(3, dtype=torch.complex64), "ids": torch.arange(3)}
    given = ResolvedModel(name="complex", kind="factory", model=model, example_inputs=inputs)
    before = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    found = in_storage(given, torch.float64)
    dtypes = {name: tensor.dtype for name, tensor in (*found.model.named_parameters(), *found.model.named_buffers())}
    assert dtypes == {"w": torch.complex128, "v": torch.float64, "phase": torch.complex128}
    assert all(torch.equal(found.model.get_parameter(n), before[n].to(dtypes[n])) for n in ("w", "v"))
    assert {name: x.dtype for name, x in found.example_inputs.items()} == {"x": torch.complex128, "ids": torch.int64}
    half = in_storage(found, torch.bfloat16)
    assert half.model.get_parameter("w").dtype == torch.complex64
