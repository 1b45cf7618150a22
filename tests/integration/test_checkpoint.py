"""A GPT-2 trained under tp=2 × dp=2 ZeRO-3 and saved with torch.distributed.checkpoint loads anywhere, bit-equal."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from integration_models import Wanted, built, materialised, planned
from suites import long

from autopar.models.load import resolve_model
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.verify.random_batches import random_batches

WANTED = Wanted(spec="gpt2", float64=True)
TIED = ("transformer.wte.weight", "lm_head.weight")
PACKED = "transformer.h.0.attn.c_attn.weight"
State = dict[str, dict[str, torch.Tensor]]


def assert_equal(found: State, saved: State) -> None:
    for part, values in saved.items():
        assert found[part].keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(found[part][name], value), (part, name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, worlds: Any) -> dict[str, Any]:
    """Two steps, a save, three more steps under tp=2 × dp=2 with ZeRO-3."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    _, plan = planned(WANTED, 4, {"tp": 2, "dp": 2, "zero": 3})
    data = random_batches(built(WANTED, plan.degrees)[0], plan.degrees, 5, 0)
    losses, whole = worlds(4).run("integration_ranks:train_and_save", WANTED, plan, data, 2, folder)[0]
    return {"folder": folder, "data": data, "losses": losses, "whole": whole, "plan": plan}


def test_what_is_saved(trained: dict[str, Any]) -> None:
    """Flat global names and shapes, a tied weight under both names, two moments per parameter."""
    whole = trained["whole"]
    plain = resolve_model("gpt2", layers=2, hidden=64, seq_len=16, batch=2).model
    assert {n: tuple(v.shape) for n, v in whole["model"].items()} == {
        n: tuple(p.shape) for n, p in plain.named_parameters(remove_duplicate=False)
    }
    assert torch.equal(whole["model"][TIED[0]], whole["model"][TIED[1]])
    assert whole["optimizer"][f"{PACKED}.exp_avg"].shape == whole["model"][PACKED].shape
    files = {path.name for path in Path(trained["folder"]).iterdir()}
    assert ".metadata" in files and len(files) > 1


@pytest.mark.parametrize(
    "wish",
    (long({"tp": 2, "dp": 2, "zero": 3}), {"tp": 4}, long({"dp": 4, "zero": 1}), long({"tp": 2, "dp": 2, "zero": 0})),
    ids=str,
)
def test_loads_bit_equal_and_goes_on(wish: dict[str, int], trained: dict[str, Any], four_ranks: Ranks) -> None:
    batch = 8 // wish.get("dp", 1)
    wanted = Wanted(spec="gpt2", float64=True, batch=batch)
    _, plan = planned(wanted, 4, wish)
    losses, whole = four_ranks.run(
        "integration_ranks:load_and_train", wanted, plan, trained["data"][2:], trained["folder"]
    )[0]
    assert_equal(whole, trained["whole"])
    for found, reference in zip(losses, trained["losses"][2:], strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-11, atol=0.0)


def test_loads_on_one_device(trained: dict[str, Any]) -> None:
    """`dcp.load` into the unmodified model's own state dict, tied and packed weights included; training goes on."""
    model = resolve_model("gpt2", layers=2, hidden=64, seq_len=16, batch=2).model
    _, source = built(WANTED, trained["plan"].degrees)
    plain = materialised(model, source).double()
    state = plain.state_dict()
    for value in state.values():
        value.fill_(float("nan"))
    dcp.load({"model": state}, checkpoint_id=trained["folder"])
    plain.load_state_dict(state)
    saved = trained["whole"]["model"]
    found = dict(plain.named_parameters(remove_duplicate=False))
    assert found[TIED[0]] is found[TIED[1]]
    assert_equal({"model": {n: found[n].detach() for n in saved}}, {"model": saved})
    loss = plain(**trained["data"][2]).loss
    torch.testing.assert_close(loss.detach().double(), trained["losses"][2].double(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("zero", (1, long(2), long(3)))
def test_an_evaluation_leaves_parameters_sharded(zero: int, worlds: Any) -> None:
    """What forward passes gather is sharded again, or the optimizer's state would be saved without its parameters."""
    _, plan = planned(WANTED, 2, {"dp": 2, "zero": zero})
    for known, same_names, count in worlds(2).run("integration_ranks:state_after_evaluating", WANTED, plan):
        assert known and same_names and count > 0
