"""Predictions against steps that were measured on one GPU (`benchmarks/one_gpu.py`): memory counted and by formulas."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from suites import thinned
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import autopar
from autopar.cost_model.parts import MEMORY

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-26-one-h100.json"
RUNS = [run for run in json.loads(MEASURED.read_text()) if not run["case"]["is_compiled"]]


def name_of(run: Mapping[str, Any]) -> str:
    name: str = run["case"]["name"]
    return name


def estimate(case: Mapping[str, Any], *, exact_memory: bool) -> autopar.Estimate:
    config = {**case["config"], "use_cache": False}
    with torch.device("meta"):
        tokens = torch.zeros(case["sequences"], case["length"], dtype=torch.long)
        model = (
            MixtralForCausalLM(MixtralConfig(**config, experts_implementation="grouped_mm"))
            if case["family"] == "mixtral"
            else LlamaForCausalLM(LlamaConfig(**config))
        )
    plan = {"dp": 1, "precision": "bf16", "recompute": case["recompute"], "micro_batch": case["micro_batch"]}
    batch = {"input_ids": tokens, "labels": tokens}
    return autopar.estimate(model, "1xh100", plan, example_inputs=batch, exact_memory=exact_memory)


@pytest.mark.parametrize("run", thinned(RUNS, keep=RUNS[::3]), ids=name_of)
@pytest.mark.parametrize("exact_memory", [True, False], ids=["counted", "formulas"])
def test_memory_and_time_of_a_measured_step(run: Mapping[str, Any], exact_memory: bool) -> None:
    """Every step had about 64 MiB more than was counted, perhaps a workspace of cuBLAS."""
    made, measured = estimate(run["case"], exact_memory=exact_memory), run["autopar"]
    tensors = made.peak_bytes - made.memory_bytes[MEMORY["cache"]] - made.memory_bytes[MEMORY["reserve"]]
    assert tensors + 2**26 == pytest.approx(measured["tensor_bytes"], rel=0.015 if exact_memory else 0.02)
    assert made.step_interval_s[0] < measured["step_s"] < made.step_interval_s[1]
