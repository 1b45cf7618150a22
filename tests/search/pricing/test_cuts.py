"""Cuts into pipeline stages: the same for given degrees and for a search, by hand, and where parameters are held."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from planned import make_plan
from suites import long

import autopar
from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.models.load import resolve_model
from autopar.planning.degrees import resolve_degrees

SIZES: Mapping[str, Mapping[str, int]] = {
    "llama3-8b": {"layers": 9, "hidden": 256, "seq_len": 128},
    "gpt2": {"layers": 9, "hidden": 192, "seq_len": 128},
    "t5-large": {"layers": 5, "hidden": 128, "seq_len": 64},
    "mixtral-8x7b": {"layers": 7, "hidden": 128, "seq_len": 64},
    "whisper-large": {"layers": 4, "hidden": 64, "seq_len": 64},
}


def own_device(device_type: str) -> ClusterSpec:
    """Eight devices that no shipped profile describes, with no unit of 16 bits."""
    spec = ClusterSpec.preset("8xcpu")
    device = replace(
        spec.groups[0].device, name="homemade", device_type=device_type, peak_flops_per_s={"float32": 2e12}
    )
    return replace(spec, groups=(replace(spec.groups[0], device=device),))


CLUSTERS = {
    "8xh100": ClusterSpec.preset("8xh100"),
    "8xv100": ClusterSpec.preset("8xv100"),
    "8xcpu": ClusterSpec.preset("8xcpu"),
    "homemade gpu": own_device("cuda"),
    "homemade cpu": own_device("cpu"),
}


@pytest.mark.parametrize(
    ("name", "cluster", "degrees"),
    [
        ("llama3-8b", "8xh100", {"pp": 4, "tp": 2}),
        long("llama3-8b", "homemade cpu", {"pp": 8}),
        ("gpt2", "8xcpu", {"pp": 4, "dp_shard": 2, "zero": 1}),
        long("llama3-8b", "8xcpu", {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 1}),
        long("gpt2", "8xv100", {"pp": 8}),
        long("gpt2", "homemade gpu", {"pp": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b", "tp": 4}),
        long("t5-large", "8xh100", {"pp": 4, "tp": 2}),
        long("mixtral-8x7b", "8xh100", {"pp": 4, "dp_shard": 2, "zero": 1, "per_micro_batch": True}),
        long("whisper-large", "8xcpu", {"pp": 4, "tp": 2}),
    ],
)
def test_given_degrees_are_cut_as_a_search_cuts_them(name: str, cluster: str, degrees: dict[str, Any]) -> None:
    spec = CLUSTERS[cluster]
    given = {"micro_batch": 2, "micro_batches": 8, "schedule": "1f1b", "recompute": "none", **degrees}
    given["sequence_parallel"] = "tp" in given
    model = resolve_model(name, batch=16, dtype="float32", **SIZES[name])
    chosen = resolve_degrees(given, 8, 16)
    program, plan = make_plan(model.model, spec, model.example_inputs, chosen)
    fixed = {**given, "dp_replicate": 1, "regather": True, "order": "pp-dp-tp"}
    searched = autopar.plan(
        model.model,
        spec,
        example_inputs=model.example_inputs,
        global_batch=16 * chosen.dp,
        fix=fixed,
        trials=0,
        top=0,
        precision="fp32",
    )
    assert searched.plan is not None
    assert plan.cuts == searched.plan.cuts
    assert autopar.estimate(program, spec, given).degrees["cuts"] == list(plan.cuts)
    stages, in_search = plan.summary, searched.plan.summary
    assert stages is not None and in_search is not None
    # the labels of a search have two data-parallel ranks, whose sums an end of the model starts
    wanted = pytest.approx([one.seconds for one in in_search.stages], rel=0.02)
    assert [one.seconds for one in stages.stages] == wanted


class EndsWithoutParameters(torch.nn.Module):
    """Three layers, and calls before and behind them that train nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 32)
        self.table.weight.requires_grad_(False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()


def test_every_stage_has_a_trained_parameter() -> None:
    """A stage without one would have no backward pass."""
    inputs = {"ids": torch.zeros(8, 16, dtype=torch.long)}
    result = autopar.plan(
        EndsWithoutParameters(), "4xcpu", example_inputs=inputs, global_batch=8, fix={"pp": (2, 3, 4), "tp": 1}
    )
    assert result.plan is not None
    assert result.plan.degrees.num_stages <= 3
    with pytest.raises(PlanError, match="3; use pp × virtual_stages of at most 3"):
        make_plan(EndsWithoutParameters(), ClusterSpec.preset("4xcpu"), inputs, resolve_degrees({"pp": 4}, 4, 8))


def test_a_model_of_one_block_has_no_stages() -> None:
    with pytest.raises(PlanError, match="the model has 1; use pp = 1, with tp or dp instead"):
        make_plan(OneProduct(), ClusterSpec.preset("2xcpu"), {"x": torch.zeros(8, 6)}, resolve_degrees({"pp": 2}, 2, 8))


class OneProduct(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()
