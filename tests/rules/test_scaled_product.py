"""Linear layers with operands of eight bits: against torchao, in shards, in captured models, and on ranks."""

import copy
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from planned import make_plan
from torch import nn

from autopar.capture.any_size import capture
from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.errors import InputError
from autopar.ir.plan import Plan
from autopar.planning.degrees import resolve_degrees
from autopar.rules.scaled_product import SCALED_LINEAR
from autopar.runtime.distributed.mesh import precision_problems

pytest.importorskip("torchao")
pytest.importorskip("transformers")


def test_fp8_has_the_bits_of_torchao() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 96, bias=False)).bfloat16()
    x, grad = torch.randn(2, 8, 64).bfloat16(), torch.randn(2, 8, 96).bfloat16()
    theirs = convert_to_float8_training(copy.deepcopy(layer), config=Float8LinearConfig(emulate=True))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    weight = layer[0].weight.detach().clone().requires_grad_()
    wanted, found = theirs(inputs[0]), SCALED_LINEAR(inputs[1], weight, "fp8")
    wanted.backward(grad)
    found.backward(grad)
    assert torch.equal(found, wanted)
    assert torch.equal(inputs[1].grad, inputs[0].grad)
    assert torch.equal(weight.grad, theirs[0].weight.grad)
    assert not torch.equal(found, layer(x))


@pytest.mark.parametrize("format", ["fp8", "mxfp8"])
def test_it_rounds_as_little_as_it_says(format: str) -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(40, 64), torch.randn(96, 64), torch.randn(40, 96)
    x.requires_grad_(), weight.requires_grad_()
    out = SCALED_LINEAR(x, weight, format)
    found = (out, *torch.autograd.grad(out, (x, weight), grad))
    exact = torch.nn.functional.linear(x, weight)
    wanted = (exact, *torch.autograd.grad(exact, (x, weight), grad))
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    assert all(0.01 < error < 0.08 for error in errors), errors
    torch.library.opcheck(SCALED_LINEAR, (x, weight, format), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("format", ["fp8", "mxfp8"])
def test_shards_together_are_the_whole(format: str) -> None:
    """Ones of both signs are not rounded, whatever their scale: split rows, features and sums give the same numbers."""
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(shape).sign() for shape in ((64, 128), (64, 128), (64, 64)))

    def run(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = (t.clone().requires_grad_() for t in (x, weight))
        out = SCALED_LINEAR(x, weight, format)
        return (out, *torch.autograd.grad(out, (x, weight), grad))

    whole = run(x, weight, grad)
    assert torch.equal(whole[0], x @ weight.t())
    rows = [run(a, weight, g) for a, g in zip(x.chunk(2), grad.chunk(2), strict=True)]
    assert torch.equal(torch.cat([r[0] for r in rows]), whole[0])
    assert torch.equal(torch.cat([r[1] for r in rows]), whole[1])
    assert torch.equal(rows[0][2] + rows[1][2], whole[2])
    features = [run(x, w, g) for w, g in zip(weight.chunk(2), grad.chunk(2, 1), strict=True)]
    assert torch.equal(torch.cat([f[0] for f in features], 1), whole[0])
    assert torch.equal(features[0][1] + features[1][1], whole[1])
    assert torch.equal(torch.cat([f[2] for f in features]), whole[2])
    sums = [run(a, w, grad) for a, w in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)]
    assert torch.equal(sums[0][0] + sums[1][0], whole[0])
    assert torch.equal(torch.cat([s[1] for s in sums], 1), whole[1])


def example(family: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: Mapping[str, Mapping[str, Any]] = {
        "llama": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2},
        "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64},
        "mixtral": {
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2,
            "num_local_experts": 16, "num_key_value_heads": 2,
        },
    }  # fmt: skip
    config = AutoConfig.for_model(family, vocab_size=128, use_cache=False, **sizes[family])
    tokens = torch.randint(0, 128, (4, 16))
    return AutoModelForCausalLM.from_config(config).train(), {"input_ids": tokens, "labels": tokens.clone()}


def scaled(program: Any) -> set[str]:
    found = (n for block in program.blocks for n in block.graph.nodes if n.target is SCALED_LINEAR)
    return {n.meta["key"].partition(":")[0] for n in found}


def test_the_layers_of_repeated_blocks_are_cast() -> None:
    projections = {f"self_attn.{name}_proj" for name in "qkvo"}
    llama = capture_program(*example("llama"), precision="fp8")
    assert scaled(llama) == projections | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert scaled(capture_program(*example("mixtral"), precision="fp8")) == projections  # no router, no expert
    assert len(scaled(capture_program(*example("gpt2"), precision="mxfp8"))) == 4  # with biases
    assert not scaled(capture_program(*example("llama"), precision="bf16"))
    model, inputs = example("llama")
    assert capture(Request.of(model, inputs).computing_in("fp8")).at(batch=8).fingerprint != llama.fingerprint
    assert scaled(capture(Request.of(model, inputs).computing_in("fp8")).at(batch=8)) == scaled(llama)


def test_sizes_that_a_kernel_does_not_take_stay_in_16_bits() -> None:
    model, inputs = example("llama")
    model.model.layers[0].mlp.gate_proj = nn.Linear(64, 90, bias=False)
    model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.down_proj = (
        nn.Linear(64, 90, bias=False), nn.Linear(90, 64, bias=False)
    )  # fmt: skip
    assert "self_attn.q_proj" in scaled(capture_program(model, inputs, precision="fp8"))


def test_a_plan_keeps_it(tmp_path: Any) -> None:
    model, inputs = example("llama")
    from autopar.ir.cluster import ClusterSpec

    degrees = resolve_degrees({"tp": 2, "dp": 2, "precision": "fp8"}, 4, 4)
    _, plan = make_plan(model, ClusterSpec.parse("4xcpu"), inputs, degrees)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.degrees.precision == "fp8"


def test_without_torchao_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(InputError, match="precision fp8 needs torchao: pip install 'torchao>="):
        capture_program(*example("llama"), precision="fp8")


def test_a_device_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    (problem,) = precision_problems("fp8", torch.device("cuda", 0))
    assert "needs compute capability 8.9, and A100 has 8.0" in str(problem)
    assert not precision_problems("fp8", torch.device("cpu"))
    assert not precision_problems("bf16", torch.device("cuda", 0))
