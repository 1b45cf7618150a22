"""A Phi-3 whose queries, keys and values are packed unequally: trained on ranks, saved and loaded as one parameter."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from integration_models import Wanted, built, materialised, planned
from suites import long

from autopar.commands.verify import verify
from autopar.models.load import resolve_model
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.verify.random_batches import random_batches

PACKED = "model.layers.1.self_attn.qkv_proj.weight"
SIZES: dict[str, int] = {"layers": 2, "hidden": 64, "seq_len": 16}
Worlds = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config file; scaled, it has 8 heads and 4 of keys and values."""
    from transformers import Phi3Config

    made = Phi3Config(num_attention_heads=40, num_key_value_heads=10, vocab_size=96, pad_token_id=0, eos_token_id=0)
    path = tmp_path_factory.mktemp("phi3") / "config.json"
    path.write_text(json.dumps(made.to_dict() | {"architectures": ["Phi3ForCausalLM"]}))
    return str(path)


@pytest.fixture(scope="module")
def trained(config: str, tmp_path_factory: pytest.TempPathFactory, worlds: Worlds) -> dict[str, Any]:
    """Two steps, a save, two more steps under tp=2 × dp=2 with ZeRO-3."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    wanted = Wanted(spec=config, float64=True)
    program, plan = planned(wanted, 4, {"tp": 2, "dp": 2, "zero": 3})
    assert f"{PACKED}[0:64]" in program.parameters and PACKED not in program.parameters
    data = random_batches(built(wanted, plan.degrees)[0], plan.degrees, 4, 0)
    losses, whole = worlds(4).run("integration_ranks:train_and_save", wanted, plan, data, 2, folder)[0]
    return {"folder": folder, "data": data, "losses": losses, "whole": whole, "plan": plan, "wanted": wanted}


@pytest.mark.parametrize("wish", ({"tp": 2, "dp": 2, "zero": 3}, long({"tp": 2, "dp": 2, "zero": 0})), ids=str)
def test_equals_one_device(wish: dict[str, int], config: str, four_ranks: Ranks) -> None:
    """Every gradient and, after three steps of AdamW, every weight, under the model's names."""
    report = verify(config, world_size=4, degrees=wish, batch=2, ranks=four_ranks, **SIZES)
    assert report.passed, [(q.name, q.where, q.max_error) for q in report.quantities]


def test_multi_query_falcon_equals_one_device(tmp_path: Path, four_ranks: Ranks) -> None:
    """Its heads are cut by lists of indices; the model lies on meta."""
    from transformers import FalconConfig

    made = FalconConfig(num_attention_heads=71, multi_query=True, vocab_size=96, alibi=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(made.to_dict() | {"architectures": ["FalconForCausalLM"]}))
    wish = {"tp": 2, "dp": 2, "zero": 3}
    report = verify(str(path), world_size=4, degrees=wish, batch=2, ranks=four_ranks, **SIZES)
    assert report.passed, [(q.name, q.where, q.max_error) for q in report.quantities]


def test_state_has_the_models_names(trained: dict[str, Any]) -> None:
    whole = trained["whole"]
    plain = resolve_model(trained["wanted"].spec, **SIZES).model
    shapes = {n: tuple(p.shape) for n, p in plain.named_parameters()}
    assert {n: tuple(v.shape) for n, v in whole["model"].items()} == shapes
    state = whole["optimizer"]
    assert set(state) == {f"{n}.{key}" for n in shapes for key in ("exp_avg", "exp_avg_sq", "step")}
    assert tuple(state[f"{PACKED}.exp_avg"].shape) == shapes[PACKED] and float(state[f"{PACKED}.step"]) == 2


@pytest.mark.parametrize("wish", (long({"tp": 4}), {"dp": 4, "zero": 1}, long({"dp": 4, "zero": 0})), ids=str)
def test_loads_bit_equal_and_goes_on(wish: dict[str, int], trained: dict[str, Any], four_ranks: Ranks) -> None:
    """Under other degrees; the step count of every piece is loaded too, or AdamW would correct its moments wrongly."""
    wanted = replace(trained["wanted"], batch=8 // wish.get("dp", 1))
    _, plan = planned(wanted, 4, wish)
    losses, whole = four_ranks.run(
        "integration_ranks:load_and_train", wanted, plan, trained["data"][2:], trained["folder"]
    )[0]
    for part, values in trained["whole"].items():
        assert whole[part].keys() == values.keys()
        assert all(torch.equal(whole[part][name], value) for name, value in values.items())
    torch.testing.assert_close(torch.stack(losses), torch.stack(trained["losses"][2:]), rtol=1e-11, atol=0.0)


def test_loads_on_one_device(trained: dict[str, Any]) -> None:
    """`dcp.load` into the unmodified model's own state dict."""
    model = resolve_model(trained["wanted"].spec, **SIZES).model
    plain = materialised(model, built(trained["wanted"], trained["plan"].degrees)[1]).double()
    state = plain.state_dict()
    for value in state.values():
        value.fill_(float("nan"))
    dcp.load({"model": state}, checkpoint_id=trained["folder"])
    plain.load_state_dict(state)
    saved = trained["whole"]["model"]
    assert all(torch.equal(p.detach(), saved[n]) for n, p in plain.named_parameters())
    loss = plain(**trained["data"][2]).loss
    torch.testing.assert_close(loss.detach().double(), trained["losses"][2].double(), rtol=1e-5, atol=0.0)
