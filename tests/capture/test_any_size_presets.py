"""Every preset, made small: captured once, its program at another batch is the one that a capture gives."""

import pytest
from same_program import differences
from suites import thinned

from autopar.capture.any_size import capture
from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.models.load import resolve_model
from autopar.presets.models import model_presets

FEW = ("bert-large", "llama3-8b")  # an encoder, rotary positions and grouped queries


@pytest.mark.parametrize("name", thinned(model_presets(), keep=FEW))
def test_another_batch_of_a_preset(name: str) -> None:
    found = resolve_model(name, layers=2, hidden=64, seq_len=40, batch=7)
    captured = capture(Request.of(found.model, found.example_inputs))
    assert captured.record is not None, captured.unknown
    assert differences(captured.at(batch=64), capture_program(found.model, found.example_inputs, batch=64)) == []
