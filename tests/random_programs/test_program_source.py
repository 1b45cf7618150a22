"""Drawn programs print as source, and every kind of program has a test file."""

import random
from pathlib import Path

import torch
from program_draws import KINDS, draw_source


def test_every_kind_has_a_test() -> None:
    assert all((Path(__file__).parent / f"test_{kind}.py").exists() for kind in KINDS)


def test_a_program_is_printed_as_the_source_that_makes_it_again() -> None:
    source = draw_source("sequence", random.Random(0))
    namespace: dict[str, object] = {"__name__": "printed"}
    exec(repr(source), namespace)
    model = namespace["Model"]
    assert isinstance(model, type) and issubclass(model, torch.nn.Module)
    inputs = namespace["inputs"]
    assert isinstance(inputs, dict)
    out = model()(**inputs)
    assert "loss" in out if isinstance(out, dict) else out.dim() == 0
