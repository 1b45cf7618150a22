"""Words of precisions and attention kernels in free text."""

import pytest

from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.published.words import attention_of_text, precision_of_text


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
