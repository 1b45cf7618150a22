"""Step times from published rates, as their sources counted FLOP."""

from dataclasses import replace

import pytest

from autopar.cost_model.published.measurement import attention_part, measured_seconds
from autopar.cost_model.published.row import Row

ROW = Row(
    id="r",
    layers=32,
    hidden=4096,
    ffn_hidden=16384,
    n_heads=32,
    vocab=50304,
    seq_len=8192,
    num_gpus=8,
    global_batch=64,
    tflops_per_gpu=400,
)


def seconds_and_mark(kind: str, **changes: int) -> tuple[float, bool]:
    found = measured_seconds(replace(ROW, tflops_kind=kind, **changes))  # type: ignore[arg-type]
    assert found is not None
    return found.seconds, found.is_ambiguous


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("model", None),
        ("hardware (incl. full recomputation)", None),
        ("model (full attention)", 1.0),
        ("model, non-causal", 1.0),
        ("hardware (incl. recompute, 96Bslh^2 formula)", 1.0),
        ("model, 72BSlh^2(1+s/6h+V/12lh)", 1.0),
        ("model (PaLM appendix B)", 1.0),
        ("model (causal attention counted)", 0.5),
        ("model, attention halved", 0.5),
        (None, None),
    ],
)
def test_the_text_says_how_attention_was_counted(kind: str | None, part: float | None) -> None:
    assert attention_part(kind) == part


def test_half_of_attention_is_less_time_and_no_word_is_ambiguous() -> None:
    whole, half, unknown = (seconds_and_mark(f"model{text}") for text in (" (full attention)", " (causal)", ""))
    assert half[0] < 0.93 * whole[0]
    assert unknown[0] == whole[0]
    assert (whole[1], half[1], unknown[1]) == (False, False, True)


def test_short_sequences_are_not_ambiguous() -> None:
    """Attention is then a small part of the work."""
    assert not seconds_and_mark("model", seq_len=512)[1]
