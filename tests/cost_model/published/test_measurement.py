"""Step times from published rates, as their sources counted FLOP."""

from dataclasses import replace

from autopar.cost_model.published.measurement import measured_seconds
from autopar.cost_model.published.row import Row

ROW = Row(
    id="r", layers=32, hidden=4096, ffn_hidden=16384, n_heads=32, vocab=50304, seq_len=8192, num_gpus=8,
    global_batch=64, tflops_per_gpu=400,
)  # fmt: skip


def seconds_and_mark(attention: float | None, **changes: int) -> tuple[float, bool]:
    row = replace(ROW, tflops_kind="model", tflops_attention=attention, **changes)  # type: ignore[arg-type]
    found = measured_seconds(row)
    assert found is not None
    return found.seconds, found.is_ambiguous


def test_half_of_attention_is_less_time_and_nothing_stated_is_ambiguous() -> None:
    whole, half, unknown = (seconds_and_mark(attention) for attention in (1.0, 0.5, None))
    assert half[0] < 0.93 * whole[0]
    assert unknown[0] == whole[0]
    assert (whole[1], half[1], unknown[1]) == (False, False, True)


def test_short_sequences_are_not_ambiguous() -> None:
    """Attention is then a small part of the work."""
    assert not seconds_and_mark(None, seq_len=512)[1]
