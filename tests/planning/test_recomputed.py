"""The least recomputation that fits, beside the other words of a plan."""

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.capture.request import Request
from autopar.cost_model.interval import usable_bytes
from autopar.ir.cluster import ClusterSpec
from autopar.ir.program import Program
from autopar.planning import fixed
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import capture_for, label_plan
from autopar.planning.machine import own_machinery

WISH = {"dp": 4, "zero": 3, "micro_batch": 1, "recompute": "auto"}


@pytest.fixture(scope="module")
def llama() -> Program:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=8))
    ids = torch.empty(4, 32, dtype=torch.long, device="meta")
    degrees = resolve_degrees({"micro_batch": 4}, 1)
    return capture_for(Request.of(model.train(), {"input_ids": ids, "labels": ids.clone()}), degrees)


@pytest.mark.parametrize("offload", ["none", "optimizer", "activations"])
def test_open_recomputation_keeps_the_offload(llama: Program, offload: str) -> None:
    wish = {**WISH, "offload": offload}
    plan = label_plan(llama, ClusterSpec.preset("4xh100"), resolve_degrees(wish, 4), "llama")
    made = autopar.estimate(llama, "4xh100", wish)
    assert (plan.degrees.offload, made.degrees["offload"]) == (offload, offload)
    assert plan.degrees.recompute == made.degrees["recompute"] == "none"  # there is room


def test_open_recomputation_counts_the_optimizer_that_was_asked_for(
    llama: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the moments of AdamW something is computed again. Without moments there is room for everything."""
    cluster, found = ClusterSpec.preset("4xh100"), own_machinery(ClusterSpec.preset("4xh100"), "float32")
    reserve = found.machine.reserve_bytes

    def recomputed(optimizer: str, free_bytes: float) -> str:
        small = replace(found, machine=replace(found.machine, memory_bytes=(reserve + free_bytes) / usable_bytes(1.0)))
        monkeypatch.setattr(fixed, "own_machinery", lambda *_: small)
        degrees = resolve_degrees({**WISH, "optimizer": optimizer}, 4)
        return fixed.label_plan(llama, cluster, degrees, "llama").degrees.recompute

    sizes = range(2_000_000, 12_000_000, 250_000)
    least = {name: next(n for n in sizes if recomputed(name, n) == "none") for name in ("adamw", "sgd")}
    assert least["sgd"] < least["adamw"]
    assert recomputed("adamw", least["sgd"]) != "none"
