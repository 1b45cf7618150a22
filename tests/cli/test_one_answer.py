"""Twenty plans: `plan`, its file, its page, `estimate` and `capacity` have the same figures, to the last bit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run import autopar, json_of

from autopar import estimate
from autopar.cost_model.capacity import VOCABULARY, capacity
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.published.machine import row_machine
from autopar.cost_model.published.row import Row
from autopar.words.numbers import readable_bytes, readable_seconds

SMALL = ("--layers", "2", "--hidden", "64", "--seq-len", "64")
GPT2, LLAMA, MIXTRAL = "gpt2", "llama3-8b", "mixtral-8x7b"
PLANS = {
    "all degrees open": (GPT2, "8xh100", "--global-batch", "64"),
    "two hosts": (LLAMA, "16xa100-80gb", "--global-batch", "64"),
    "many devices": (LLAMA, "1024xh100", "--global-batch", "4096"),
    "one card": (GPT2, "1xrtx4090", "--global-batch", "8"),
    "CPU ranks": (LLAMA, "4xcpu", "--global-batch", "8"),
    "tensor parallelism": (GPT2, "8xh100", "--tp", "4", "--dp", "2", "--global-batch", "16"),
    "ZeRO 1": (GPT2, "4xh100", "--dp", "4", "--zero", "1", "--global-batch", "16"),
    "ZeRO 3": (LLAMA, "4xh100", "--dp", "4", "--zero", "3", "--global-batch", "16"),
    "replicas": (LLAMA, "16xh100", "--dp", "8", "--dp-replicate", "2", "--zero", "3", "--global-batch", "32"),
    "a pipeline": (GPT2, "2xh100", "--pp", "2", "--global-batch", "16"),
    "virtual stages": (LLAMA, "4xh100", "--pp", "2", "--schedule", "interleaved-1f1b", "--virtual-stages", "2",
                       "--global-batch", "8"),
    "zero bubble": (GPT2, "2xh100", "--pp", "2", "--schedule", "zbv-zero-bubble", "--global-batch", "8"),
    "context parallelism": (LLAMA, "4xh100", "--cp", "2", "--global-batch", "8"),
    "experts": (MIXTRAL, "8xh100", "--ep", "4", "--global-batch", "16"),
    "full recomputation": (LLAMA, "4xh100", "--recompute", "full", "--global-batch", "16"),
    "selective recomputation": (GPT2, "4xh100", "--recompute", "selective", "--global-batch", "16"),
    "optimizer on the host": (GPT2, "4xh100", "--offload", "optimizer", "--global-batch", "16"),
    "chunks of the loss": (GPT2, "4xh100", "--loss-chunks", "4", "--global-batch", "16"),
    "sums in 32 bits": (GPT2, "4xh100", "--reduce-dtype", "fp32", "--global-batch", "16"),
    "another optimizer": (GPT2, "4xh100", "--optimizer", "sgd", "--global-batch", "16"),
}  # fmt: skip
FIGURES = ("step_s", "step_interval_s", "peak_bytes", "peak_interval_bytes", "device_bytes", "mfu")


SHORT = ("all degrees open", "tensor parallelism", "a pipeline", "chunks of the loss")
CASES = [pytest.param(asked, id=name, marks=() if name in SHORT else pytest.mark.long) for name, asked in PLANS.items()]


@pytest.mark.parametrize("asked", CASES)
def test_a_plan_has_one_price(asked: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, cluster, *options = asked
    files = {name: tmp_path / name for name in ("plan.json", "result.json", "page.html")}
    result = json_of("plan", model, "-c", cluster, *SMALL, *options, "-o", str(files["plan.json"]))
    searched = {
        **{name: result[name] for name in ("step_interval_s", "peak_interval_bytes", "device_bytes")},
        **{name: result["best"][name] for name in ("step_s", "peak_bytes")},
        "mfu": result["details"]["rates"]["mfu"],
    }
    price = json_of("estimate", str(files["plan.json"]), "-c", cluster, *SMALL[:4])
    assert price["fits"] and {name: price[name] for name in FIGURES} == searched
    predicted = json.loads(files["plan.json"].read_text())["predicted"]
    assert {name: predicted[name] for name in FIGURES} == searched
    files["result.json"].write_text(json.dumps(result))
    assert autopar("report", str(files["result.json"]), "--out", str(files["page.html"])).exit_code == 0
    page, ranks = files["page.html"].read_text(), result["details"]["ranks"]
    assert readable_bytes(searched["peak_bytes"]) in page and readable_seconds(searched["step_s"]) in page
    assert max(sum(rank["bytes"].values()) for rank in ranks) == pytest.approx(searched["peak_bytes"], rel=1e-12)
    assert sum(price["memory_bytes"].values()) == searched["peak_bytes"]


def test_capacity_is_the_estimate_of_its_model() -> None:
    """The largest model under plain data parallelism on 8 cards of 6 GB, built and estimated."""
    transformers = pytest.importorskip("transformers")
    machine = row_machine(Row(id="capacity", gpu_type="h100-sxm"), engine_named("autopar"), mechanisms())
    largest = capacity([8], replace(machine, memory_bytes=6e9), 256)[0]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=largest.blocks, hidden_size=largest.hidden, num_attention_heads=largest.blocks,
                num_key_value_heads=min(8, largest.blocks), intermediate_size=int(3.5 * largest.hidden),
                vocab_size=VOCABULARY, tie_word_embeddings=False, dtype=torch.bfloat16,
            )
        )  # fmt: skip
    ids = torch.zeros(1, 256, dtype=torch.int64)
    price = estimate(
        model, "8xh100", {"dp": 8, "zero": 0, "micro_batch": 1, "recompute": "full"},
        example_inputs={"input_ids": ids, "labels": ids}, global_batch=8,
    )  # fmt: skip
    assert price.num_parameters == largest.parameters and price.peak_bytes == largest.peak_bytes
