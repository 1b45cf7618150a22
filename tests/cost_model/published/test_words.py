"""Words of precisions, attention kernels and options in free text."""

import pytest

from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.published.words import attention_of_text, engine_with_options, precision_of_text


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
        (None, "bf16"),
    ],
)
def test_precisions(text: str | None, precision: str) -> None:
    assert precision_of_text(text) == (precision, None)


def test_a_precision_that_is_not_known_is_a_warning() -> None:
    precision, warning = precision_of_text("posit16")
    assert precision == "bf16"
    assert warning == "precision 'posit16' is not known; bf16 is used"


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
        (None, True, "second"),
    ],
)
def test_attention(text: str | None, fused: bool, kernel: str) -> None:
    found = attention_of_text(text, engine_named("neutral"))
    assert (found.fused, found.kernel) == (fused, kernel)


def test_what_a_text_leaves_open_is_the_engine_s() -> None:
    assert attention_of_text("flash", engine_named("internevo")).kernel == "first"
    assert not attention_of_text(None, engine_named("megatron-2021")).fused


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
    assert engine_with_options(neutral, "our own trainer") is neutral
    assert engine_with_options(neutral, None) is neutral


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
