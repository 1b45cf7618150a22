"""Words of frameworks, precisions, attention kernels and options in free text."""

import csv
import importlib
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.machine.engine import Engine, engine_named
from autopar.cost_model.published.row import read_rows

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "benchmarks" / "data" / "published_runs.csv"
sys.path.append(str(ROOT / "tools"))
published_columns = importlib.import_module("published_columns")
engine_of_framework, link_gb_per_s = published_columns.engine_of_framework, published_columns.link_gb_per_s

# Text of `inter_link`, devices of a host, rows, and GB/s of one device as they were read by eye.
BETWEEN_HOSTS = [
    (None, None, 1, None),
    (None, 8, 108, None),
    ("single node", 8, 65, None),
    ("OCI RDMA (RoCE)", 8, 2, None),
    ("400Gb/s per node", 8, 4, 6.25),
    ("800Gb/s per node", 8, 4, 12.5),
    ("4x 100Gb/s RoCE per node", 8, 54, 6.25),
    ("4x Omni-Path 100Gb/s per node", 8, 113, 6.25),
    ("4x HDR InfiniBand (ConnectX-6) per node", 8, 1, 12.5),
    ("Omni-Path 100Gb/s (Jean Zay V100 partition)", 4, 27, 12.5),
    ("simulator config: 800Gb/s per node", 8, 109, 12.5),
    ("8x HDR InfiniBand 200Gb/s per node", 8, 22, 25.0),
    ("RoCE 1600Gb/s per node", 8, 139, 25.0),
    ("8x NDR InfiniBand 400Gb/s per node", 8, 15, 50.0),
    ("RDMA 400Gb/s per GPU", 8, 33, 50.0),
    ("RDMA CX-7 400Gb/s per GPU", 8, 2, 50.0),
    ("NDR InfiniBand 400Gb/s per GPU (standard DGX H100 spec)", 8, 145, 50.0),
    ("NDR InfiniBand 400Gb/s per GPU (standard DGX B200 spec)", 8, 1, 50.0),
    ("NVIDIA GB200 NVL72 reference architecture (400Gb/s per GPU std)", 4, 33, 50.0),
]


def engine_with_options(engine: Engine, text: str, attention: str = "") -> Engine:
    return engine.model_copy(update=published_columns.options_of(engine, text, attention))


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("bf16", "bf16"),
        ("BF16 mixed precision", "bf16"),
        ("bfloat16", "bf16"),
        ("FP16 (AMP)", "fp16"),
        ("half", "fp16"),
        ("FP8 (E4M3, delayed scaling)", "fp8"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "nvfp4"),
        ("fp4", "mxfp4"),
        ("float32", "fp32"),
        ("posit16", ""),
    ],
)
def test_precisions(text: str, precision: str) -> None:
    assert published_columns.precision_of(text) == precision


@pytest.mark.parametrize(
    ("text", "fused", "kernel"),
    [
        ("FlashAttention-3", True, "native"),
        ("flash attention v2", True, "second"),
        ("FA2", True, "second"),
        ("cuDNN fused attention", True, "native"),
        ("Transformer Engine", True, "native"),
        ("flash (SDPA)", True, "second"),
        ("flash/triton (MPT, ALiBi)", True, "first"),
        ("xformers memory efficient", True, "first"),
        ("flash", True, "second"),  # the engine's
        ("unfused (fused softmax)", False, "second"),
        ("standard PyTorch, no flash", False, "second"),
        ("eager", False, "second"),
        ("", True, "second"),
    ],
)
def test_attention(text: str, fused: bool, kernel: str) -> None:
    engine = engine_with_options(engine_named("neutral"), "", text)
    assert (engine.attention == "fused", engine.attention_kernel) == (fused, kernel)


def test_what_a_text_leaves_open_is_the_engine_s() -> None:
    assert published_columns.options_of(engine_named("internevo"), "", "flash") == {}
    assert published_columns.options_of(engine_named("megatron-2021"), "", "") == {}


@pytest.mark.parametrize(
    ("text", "pointwise", "dispatch", "tensor_overlap"),
    [
        ("torchtitan", "fused", "lean", "none"),
        ("torchtitan, torch.compile", "fused", "lean", "none"),
        ("torchtitan (eager)", "eager", "eager", "none"),
        ("torchtitan without torch.compile", "eager", "eager", "none"),
        ("torchtitan, compile=False", "eager", "eager", "none"),
        ("torchtitan, not compiled", "eager", "eager", "none"),
        ("torchtitan, AsyncTP", "fused", "lean", "pipelined"),
        ("torchtitan, async TP, no compile", "eager", "eager", "pipelined"),
        ("torchtitan, asynchronous tensor parallelism", "fused", "lean", "pipelined"),
        ("torchtitan, no async TP", "fused", "lean", "none"),
    ],
)
def test_options_of_a_framework(text: str, pointwise: str, dispatch: str, tensor_overlap: str) -> None:
    engine = engine_with_options(engine_named("fsdp"), text)
    assert (engine.pointwise, engine.dispatch, engine.tensor_overlap) == (pointwise, dispatch, tensor_overlap)


def test_options_of_a_framework_that_is_not_known() -> None:
    neutral = engine_named("neutral")
    assert engine_with_options(neutral, "our own trainer, torch.compile").pointwise == "fused"
    assert engine_with_options(neutral, "our own trainer") == neutral


@pytest.mark.parametrize(("text", "overlap"), [("--tp-comm-overlap", "pipelined"), ("no TP comm overlap", "none")])
def test_the_option_of_megatron(text: str, overlap: str) -> None:
    assert engine_with_options(engine_named("megatron"), f"Megatron-LM {text}").tensor_overlap == overlap


def test_a_compiled_block_does_not_slow_a_recorded_graph() -> None:
    assert engine_with_options(engine_named("jax"), "MaxText, compiled by XLA").dispatch == "graph"


@pytest.mark.parametrize(
    ("text", "offload"),
    [
        ("DeepSpeed ZeRO-Offload", "optimizer"),
        ("ZeRO-2, CPU Adam", "optimizer"),
        ("Megatron, --optimizer-cpu-offload", "optimizer"),
        ("offload_optimizer: cpu", "optimizer"),
        ("optimizer states on the host", "optimizer"),
        ("ZeRO-Infinity", "parameters"),
        ("FSDP2 with parameter offload", "parameters"),
        ("offload_param=cpu, offload_optimizer=cpu", "parameters"),
        ("activation offloading", "activations"),
        ("optimizer offload and activation offload", "optimizer+activations"),
        ("no CPU offload", "none"),
        ("offload=none", "none"),
        ("FSDP2", "none"),
    ],
)
def test_values_on_the_host(text: str, offload: str) -> None:
    assert engine_with_options(engine_named("fsdp"), text).offload == offload


# ---- engines and families ----


@pytest.mark.parametrize(
    "framework, name",
    [
        ("NeMo/Megatron-Core", "megatron"),
        ("NeMo/Megatron-Core (MLPerf)", "megatron-mlperf"),
        ("Megatron-LM 2021", "megatron-2021"),
        ("Megatron-LM 2022", "megatron-2022"),
        ("MegatronLM (fork of 2023)", "megatron-2022"),
        ("NVIDIA Megatron LM", "megatron"),
        ("Megatron-DeepSpeed style", "megatron-deepspeed"),
        ("DeepSpeed", "deepspeed"),
        ("LLMQ 2025 (CUDA/C++)", "llmq"),
        ("LLaMA-Factory 2025 (HF transformers Trainer, DDP)", "accelerate"),
        ("torchtitan FSDP2", "fsdp"),
        ("MaxText (JAX)", "jax"),
        ("our trainer on torchtitan", "fsdp"),
        ("litgpt", "fsdp"),
    ],
)
def test_the_longest_name_decides(framework: str, name: str) -> None:
    found = engine_of_framework(framework)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("framework", ("in-house, Megatron-style", "internal FSDP2 trainer", "based on DeepSpeed, own"))
def test_a_framework_that_is_only_like_an_engine_is_guessed(framework: str) -> None:
    cells, unclear = published_columns.strict_cells({"framework": framework})
    assert cells["engine"] and cells["engine_basis"] == "guessed" and "is only like engine" in unclear[0]
    assert "engine_basis" not in published_columns.strict_cells({"framework": "NeMo/Megatron-Core 0.9"})[0]


def test_unknown_framework_has_none() -> None:
    assert engine_of_framework("something else") is None
    assert engine_of_framework("NeMoTron's successor") is None  # a part of a word is no name


def test_the_year_of_the_source_decides_between_engines_of_one_framework() -> None:
    years = (("Megatron-LM", "arXiv 2205.05198"), ("Megatron-LM", "SC 2021"), ("Megatron-LM (2025)", "SC 2021"))
    assert [engine_of_framework(*texts).name for texts in years] == ["megatron-2022", "megatron-2021", "megatron"]
    assert engine_of_framework("DeepSpeed", "arXiv 2104.04473").name == "deepspeed-zero3"


@pytest.mark.parametrize(
    "columns, family",
    [
        ({"model": "Llama 3.1 8B", "gated_mlp": "true"}, ""),
        ({"model": "Qwen3 30B-A3B", "gated_mlp": "true", "moe_experts": "128"}, "qwen3-moe"),
        ({"model": "Phi-3-mini", "gated_mlp": "true"}, "phi3"),
        ({"model": "Falcon-7B", "n_kv_heads": "1"}, "falcon-mqa"),
        ({"model": "Falcon-40B"}, "falcon"),
        ({"model": "MPT-7B"}, "mpt"),
        ({"model": "MPT-7B", "attn_impl": "torch"}, "mpt-torch"),
    ],
)
def test_families_by_name(columns: dict[str, str], family: str) -> None:
    assert published_columns.strict_cells(columns)[0]["family"] == family


@pytest.mark.parametrize(
    ("detail", "ranks"),
    [("sharded within groups of 8", "8"), ("FSDP=32, DP=2", "32"), ("HSDP (shard within node)", "4"), ("FSDP2", "")],
)
def test_ranks_that_divide_state(detail: str, ranks: str) -> None:
    assert published_columns.strict_cells({"zero_detail": detail, "gpus_per_node": "4"})[0]["shard_ranks"] == ranks


@pytest.mark.parametrize(
    ("kind", "word", "part"),
    [
        ("model", "model", None),
        ("hardware (incl. full recomputation)", "hardware", None),
        ("model (full attention)", "model", "1"),
        ("model, non-causal", "model", "1"),
        ("hardware (incl. recompute, 96Bslh^2 formula)", "hardware", "1"),
        ("model, 72BSlh^2(1+s/6h+V/12lh)", "model", "1"),
        ("model (PaLM appendix B)", "model", "1"),
        ("model (causal attention counted)", "model", "0.5"),
        ("model, attention halved", "model", "0.5"),
        ("as reported", "", None),
    ],
)
def test_what_a_source_counted(kind: str, word: str, part: str | None) -> None:
    cells, _ = published_columns.strict_cells({"tflops_kind": kind})
    assert (cells["tflops_kind"], cells.get("tflops_attention")) == (word, part)


@pytest.mark.parametrize(
    ("text", "name"),
    [("H100-SXM", "H100-SXM"), ("A100-80", "A100-80"), ("MI325X-Platinum", "mi325x"), ("TPUv4", ""), ("", "")],
)
def test_devices(text: str, name: str) -> None:
    cells, unclear = published_columns.strict_cells({"gpu_type": text, "inter_link": "8x 200Gb/s"})
    assert (cells["gpu_type"], cells["inter_gb_per_s"]) == (name, "25")
    assert unclear == (["device 'TPUv4' is not known"] if text == "TPUv4" else [])


# ---- links and files ----


def test_every_link_of_the_collection() -> None:
    rows = Counter((row.inter_link, row.gpus_per_node, row.inter_gb_per_s) for row in read_rows(RUNS))
    assert rows == Counter({(text, devices, stated): count for text, devices, count, stated in BETWEEN_HOSTS})
    read = [link_gb_per_s(text or "", devices or 8) for text, devices, _, _ in BETWEEN_HOSTS]
    assert [rate for rate, _ in read] == [stated for _, _, _, stated in BETWEEN_HOSTS]
    unclear = [text for (text, *_), (_, doubt) in zip(BETWEEN_HOSTS, read, strict=True) if doubt]
    assert unclear == ["Omni-Path 100Gb/s (Jean Zay V100 partition)"]


def test_the_documentation_reads_these_texts() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    lines = page.partition("read as, GB/s per device |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(lines) == 4
    for line in lines:
        texts, result = line.strip("|").split("|")
        expected = float(result.partition(",")[0]) if result.strip()[0].isdigit() else None
        for text in re.findall("`([^`]+)`", texts):
            rate, doubt = link_gb_per_s(text, 8)
            assert (rate, bool(doubt)) == (expected, "with a warning" in result), text


@given(st.text(alphabet="1248 0.,xX×/()-GTMgbBps" + "perGPUnodeNDRHDRNICeach", max_size=60))
def test_no_link_ends_in_an_exception(text: str) -> None:
    rate, _ = link_gb_per_s(text, 8)
    assert rate is None or 0 < rate < float("inf")


def test_a_file_gets_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The columns of the collection are what the tool writes."""
    rows = list(csv.DictReader(RUNS.open(newline="")))
    written = ("inter_gb_per_s", "engine", "pointwise", "dispatch", "tensor_overlap", "family", "shard_ranks")
    with (tmp_path / "old.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if name not in written], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "old.csv"), "--out", str(tmp_path / "new.csv")])
    published_columns.main()
    assert (tmp_path / "new.csv").read_text() == RUNS.read_text()
    assert "'Omni-Path 100Gb/s (Jean Zay V100 partition)' does not say" in capsys.readouterr().out
