"""Weights of a meta model, one at a time: the same whatever the order, the process or the source."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from autopar.errors import InputError
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.parameters.state_loading import (
    StateSource,
    compare_state,
    ignored_names,
    model_tensors,
    open_state,
)

transformers = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def check_state(model: nn.Module, state: StateSource) -> None:
    compare_state(model_tensors(model), open_state(state), ignored=ignored_names(model))


def llama(**changes: object) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | changes)))


def gpt2() -> nn.Module:
    config = {"vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, bos_token_id=0, eos_token_id=0))


def t5() -> nn.Module:
    config = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**config, decoder_start_token_id=0))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, num_local_experts=4))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
    )


def torch_encoder() -> nn.Module:
    return nn.Transformer(64, 4, 2, 2, 128, batch_first=True)


def on_meta(build: Callable[..., nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return build()
    finally:
        torch.set_default_dtype(default)


def on_cpu(build: Callable[..., nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def values(model: nn.Module, seed: int = 0, **options: torch.dtype) -> dict[str, torch.Tensor]:
    source = parameter_source(model, seed=seed, **options)
    return {name: source(name) for name, _ in [*model.named_parameters(), *model.named_buffers()]}


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in values(model).items():
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---- seeded initialisation ----


@pytest.mark.parametrize("build", [llama, gpt2, t5, mixtral, bert, torch_encoder])
def test_distribution_is_that_of_construction(build: Callable[[], nn.Module]) -> None:
    reference, found = on_cpu(build), values(on_meta(build))
    for name, expected in reference.named_parameters():
        actual = found[name]
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        spread = expected.std()
        if expected.numel() == 1 or spread == 0:
            torch.testing.assert_close(actual, expected.detach(), rtol=0, atol=0, msg=name)
        else:  # the standard error of a standard deviation is at most 1/sqrt(2 n) of it
            error = 6 * (2 / expected.numel()) ** 0.5
            assert abs(actual.std() / spread - 1) < error, name
            assert abs(actual.mean() - expected.mean()) < error * spread, name
            assert not torch.equal(actual, expected)


@pytest.mark.parametrize("build", [llama, gpt2, bert, torch_encoder])
def test_buffers_are_those_of_construction(build: Callable[[], nn.Module]) -> None:
    found = values(on_meta(build))
    for name, expected in on_cpu(build).named_buffers():
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("rope", ["llama3", "linear", "yarn"])
def test_scaled_rotary_tables(rope: str) -> None:
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 8.0}
    if rope == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope != "linear":
        parameters |= {"original_max_position_embeddings": 256}

    def build() -> nn.Module:
        return llama(rope_parameters=dict(parameters))

    found = values(on_meta(build))
    for name, expected in on_cpu(build).named_buffers():
        assert torch.equal(found[name], expected), name


def test_gpt2_scales_residual_projections_by_depth() -> None:
    found = values(on_meta(gpt2))  # 4 layers
    assert found["transformer.h.1.attn.c_proj.weight"].std() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert found["transformer.h.1.attn.c_attn.weight"].std() == pytest.approx(0.02, rel=0.05)


def test_padding_rows_norms_and_biases() -> None:
    def build() -> nn.Module:
        return llama(pad_token_id=3, attention_bias=True)

    found = values(on_meta(build))
    assert not found["model.embed_tokens.weight"][3].any() and found["model.embed_tokens.weight"][4].any()
    assert (found["model.norm.weight"] == 1).all()
    assert (found["model.layers.0.self_attn.q_proj.bias"] == 0).all()


def test_order_of_asking_does_not_matter() -> None:
    model = on_meta(llama)
    forwards, source = values(model), parameter_source(model, state=None, seed=0, dtype=None)
    for name in reversed(forwards):
        torch.rand(3)
        assert torch.equal(source(name), forwards[name])


def test_seed_and_name_decide() -> None:
    model = on_meta(llama)
    first, second = values(model, 0), values(model, 1)
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(first[q], second[q])
    assert not torch.equal(first[q], first[k])


def test_another_process_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with Ranks(1) as other:
        assert other.run(f"{Path(__file__).stem}:drawn") == [drawn(0)]


def drawn(rank: int) -> str:
    return fingerprint(on_meta(llama))


def test_tied_names_are_one_tensor() -> None:
    def build() -> nn.Module:
        return llama(tie_word_embeddings=True)

    source = parameter_source(on_meta(build), state=None, seed=0, dtype=None)
    assert torch.equal(source("lm_head.weight"), source("model.embed_tokens.weight"))


def test_the_model_and_the_generators_stay_as_they_were() -> None:
    model = on_meta(gpt2)
    before = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    values(model)
    assert torch.equal(torch.get_rng_state(), state)
    after = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert after == before
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert not any(hasattr(m, "_is_hf_initialized") for m in model.modules())


def test_meta_tensors_draw_no_random_numbers() -> None:
    """What the whole scheme rests on."""
    state = torch.get_rng_state()
    weight = torch.empty(100, 100, device="meta")
    nn.init.normal_(weight), nn.init.kaiming_uniform_(weight), nn.init.trunc_normal_(weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_op_contexts_of_transformers_do_not_reach_in() -> None:
    from transformers import initialization

    model, plain = on_meta(llama), on_meta(torch_encoder)
    expected = fingerprint(model), fingerprint(plain)
    with initialization.no_init_weights(), torch.device("meta"):
        assert (fingerprint(model), fingerprint(plain)) == expected
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    assert fingerprint(model) == expected[0]


def test_bfloat16_keeps_rotary_tables_precise() -> None:
    model = on_meta(llama, torch.bfloat16)
    found = values(model)
    assert found["model.norm.weight"].dtype == torch.bfloat16
    assert found["model.embed_tokens.weight"].float().std() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(found["model.rotary_emb.inv_freq"], values(on_meta(llama))["model.rotary_emb.inv_freq"])


def test_dtype_casts_what_the_model_would_draw() -> None:
    model = on_meta(llama)
    single, double = values(model), values(model, dtype=torch.float64)
    half = values(model, dtype=torch.bfloat16)
    for name in single:
        assert torch.equal(double[name], single[name].double()), name
    assert half["model.norm.weight"].dtype == torch.bfloat16
    assert half["model.rotary_emb.inv_freq"].dtype == torch.float32


# ---- modules of users ----


class Rope(nn.Module):
    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("table", 1.0 / base ** (torch.arange(0, dim, 2) / dim), persistent=False)


class Forgetful(nn.Module):
    """Does not keep what its table was made with."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base * 2
        self.register_buffer("table", torch.full((4,), base), persistent=False)


class Bare(nn.Module):
    def __init__(self, width: int = 4) -> None:  # not kept: the module cannot be built again
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(width))


class Nano(nn.Module):
    """The scheme of many small models: one function applied to every module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 7.0)


class OnlyHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:2].zero_()


class Coupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.empty(4))
        self.g = nn.Parameter(torch.empty(()))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.v.normal_()
            self.g.copy_(self.v.norm())


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.rand(8))
        self.other = nn.Parameter(torch.rand(8))


def test_bare_parameter_is_an_error_that_says_what_to_do() -> None:
    source = parameter_source(on_meta(Bare), state=None, seed=0, dtype=None)
    assert source("inner.weight").abs().max() <= 0.5
    with pytest.raises(
        InputError, match=r"scale, float32 \(4,\) of Bare.*state dict.*define reset_parameters\(\) in Bare"
    ):
        source("scale")


def test_half_written_is_an_error() -> None:
    with pytest.raises(InputError, match="writes all of it"):
        values(on_meta(OnlyHalf))


def test_initialisers_that_read_other_parameters_are_an_error() -> None:
    with pytest.raises(InputError, match="initialising g of a meta model failed"):
        values(on_meta(Coupled))


def test_replaced_parameters_are_put_back() -> None:
    model = on_meta(Replacing)
    before = dict(model.named_parameters())
    found = values(model)
    assert not torch.equal(found["weight"], found["other"])
    assert all(p is before[name] and p.is_meta for name, p in model.named_parameters())


def test_function_applied_to_every_module() -> None:
    found = values(on_meta(Nano))
    assert (found["body.1.weight"] == 7).all() and found["body.1.bias"].abs().max() <= 0.25
    assert found["body.0.weight"].std() == pytest.approx(1, rel=0.1)
    assert (found["body.2.running_var"] == 1).all() and found["body.2.num_batches_tracked"] == 0


def test_buffers_are_rebuilt_by_the_constructor() -> None:
    model = on_meta(lambda: nn.Sequential(Rope(8, 500.0)))
    assert torch.equal(values(model)["0.table"], Rope(8, 500.0).table)


def test_buffers_whose_arguments_are_not_kept_are_an_error() -> None:
    with pytest.raises(InputError, match="cannot be built again"):
        values(on_meta(lambda: Forgetful(3.0)))


def test_real_models_give_their_own_tensors() -> None:
    model = on_cpu(llama)
    found = values(model)
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters())
    assert not any(t.requires_grad for t in found.values())


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match=r"did you mean 'model.norm.weight'"):
        parameter_source(on_meta(llama), state=None, seed=0, dtype=None)("model.nrm.weight")


# ---- states ----


def sharded(state: dict[str, torch.Tensor], folder: Path) -> Path:
    folder.mkdir()
    names = sorted(state)
    weight_map = {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: state[n] for n in names[i::2]}, folder / file)
        weight_map |= dict.fromkeys(names[i::2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def equal_to(model: nn.Module, source: Callable[[str], torch.Tensor]) -> bool:
    return all(torch.equal(source(n), t) for n, t in [*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("tied", [False, True])
def test_every_source_gives_the_same(tmp_path: Path, tied: bool) -> None:
    def build() -> nn.Module:
        return llama(tie_word_embeddings=tied)

    model, meta = on_cpu(build), on_meta(build)
    state = model.state_dict()
    assert equal_to(model, parameter_source(meta, state=state, seed=0, dtype=None))
    if tied:
        del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    folder = sharded(state, tmp_path / "sharded")
    for path in (tmp_path, str(tmp_path / "model.safetensors"), folder, folder / "model.safetensors.index.json"):
        assert equal_to(model, parameter_source(meta, state=path, seed=0, dtype=None)), path
    (folder / "model.safetensors.index.json").unlink()
    assert equal_to(model, parameter_source(meta, state=folder, seed=0, dtype=None))
    if tied:
        state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
        assert equal_to(model, parameter_source(meta, state=state, seed=0, dtype=None))


def test_state_is_cast_to_the_model() -> None:
    state = {name: t.double() for name, t in on_cpu(llama).state_dict().items()}
    source = parameter_source(on_meta(llama, torch.bfloat16), state=state, seed=0, dtype=None)
    assert source("model.norm.weight").dtype == torch.bfloat16


def test_all_differences_at_once() -> None:
    state = on_cpu(llama).state_dict()
    del state["model.norm.weight"]
    state["model.embed_tokens.weight"] = torch.zeros(255, 64)
    state["lm_head.weight"] = torch.zeros(256, 64, device="meta")
    state["model.layers.0.input_layernorm.weight"] = torch.zeros(64, dtype=torch.int64)
    state["other"] = torch.zeros(1)
    with pytest.raises(InputError, match="1 missing, 1 unknown, 3 mismatching") as caught:
        check_state(on_meta(llama), state)
    found = {problem.path: problem.rule for problem in caught.value.problems}
    assert found["model.norm.weight"] == "is missing; shape (64,)"
    assert found["model.embed_tokens.weight"] == "must have shape (256, 64)"
    assert found["lm_head.weight"] == "must hold data, but lies on meta"
    assert found["model.layers.0.input_layernorm.weight"] == "must be torch.float32"
    assert found["other"] == "is not a name of the model"


def test_nothing_is_loaded_before_the_state_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    meta, state = on_meta(llama), {"x": torch.zeros(1)}
    monkeypatch.setattr(torch.Tensor, "detach", lambda self: pytest.fail("loaded"))
    with pytest.raises(InputError):
        parameter_source(meta, state=state, seed=0, dtype=None)


def test_a_missing_prefix_is_recognised() -> None:
    state = {name.removeprefix("transformer."): t for name, t in on_cpu(gpt2).state_dict().items()}
    with pytest.raises(InputError, match=r"its names lack the prefix 'transformer\.'"):
        check_state(on_meta(gpt2), state)
    wrapped = {"module." + name: t for name, t in on_cpu(gpt2).state_dict().items()}
    with pytest.raises(InputError, match=r"its names have the prefix 'module\.'"):
        check_state(on_meta(gpt2), wrapped)


def test_tied_names_with_different_values_are_refused() -> None:
    def build() -> nn.Module:
        return llama(tie_word_embeddings=True)

    state = dict(on_cpu(build).state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    source = parameter_source(on_meta(build), state=state, seed=0, dtype=None)
    with pytest.raises(InputError, match="are one parameter in the model but hold different values"):
        source("lm_head.weight")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/model.safetensors", "..", "a\\b.safetensors", "a.bin"])
def test_indices_stay_in_their_folder(tmp_path: Path, file: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(InputError, match="plain names"):
        check_state(on_meta(llama), folder)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    meta = on_meta(llama)
    with pytest.raises(InputError, match="no such file"):
        check_state(meta, tmp_path / "none.safetensors")
    with pytest.raises(InputError, match="holds no"):
        check_state(meta, tmp_path)
    torch.save({}, tmp_path / "weights.pt")
    with pytest.raises(InputError, match="pickled weights are never read"):
        check_state(meta, tmp_path / "weights.pt")
    save_file(on_cpu(llama).state_dict(), tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        check_state(meta, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        check_state(meta, tmp_path)


def test_one_name_in_two_files_without_an_index(tmp_path: Path) -> None:
    for file in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(InputError, match="x is in several files"):
        check_state(on_meta(llama), tmp_path)
