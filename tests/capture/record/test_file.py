"""A capture as a file: reading gives the written capture, and refuses other files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from same_program import differences
from suites import thinned
from torch import nn

from autopar.capture.any_size import Capture, capture
from autopar.capture.program import capture_program
from autopar.capture.record.file import capture_text, open_capture
from autopar.capture.request import Request
from autopar.errors import CaptureError, InputError


class Literals(nn.Module):
    """Uses tensors that its own code makes, of several dtypes, and a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        y = self.layer(x) + torch.tensor([0.1, -0.0, 1e-30, math.pi, 2.0, 3.0])
        y = y.masked_fill(torch.tensor([True, False, False, True, False, False]), float("-inf")).clamp(min=-1e4)
        return (y * torch.tensor([3, 1, 4, 1, 5, 9])).to(torch.float64).sum()


MODELS: dict[str, Any] = {
    "llama": lambda: tiny_models.llama(2),
    "gpt2": lambda: tiny_models.gpt2(2),
    "literals": lambda: (Literals(), {"x": torch.zeros(4, 10, 6)}),
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "capture.json"
    path.write_text(capture_text(capture(Request.of(*tiny_models.mlp(2))), about={"model": "mlp"}, notes=("a note",)))
    return path


@pytest.mark.parametrize("name", thinned(MODELS, keep=("llama", "literals")))
def test_what_is_read_is_what_was_written(name: str, tmp_path: Path) -> None:
    model, inputs = MODELS[name]()
    made = capture(Request.of(model, inputs))
    path = tmp_path / "capture.json"
    path.write_text(capture_text(made, about={}))
    read = open_capture(path)[1]()
    assert read.record == made.record
    assert differences(read.at(batch=9), capture_program(model, inputs, batch=9)) == []
    with pytest.raises(CaptureError, match="not known at batch 9 and sequence 99"):
        read.at(batch=9, sequence=99)


def test_the_header_is_kept(written: Path) -> None:
    header, _ = open_capture(written)
    assert (header.about, header.notes) == ({"model": "mlp"}, ("a note",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "cannot be read"),
        (lambda text: "{}", "cannot be read"),
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: text.replace('"loss":"', '"loss":"x'), "damaged"),
        (lambda text: text.replace('"version":3', '"version":99'), "version 99"),
        (lambda text: text.replace('"version":3', '"version":1,"more":2'), "cannot be read"),
        (lambda text: "\0" + text, "cannot be read"),
    ],
    ids=["empty", "foreign", "cut off", "changed", "newer", "unknown key", "bytes"],
)
def test_other_content_is_refused(written: Path, change: Any, message: str) -> None:
    written.write_text(change(written.read_text()))
    with pytest.raises(InputError, match=message):
        open_capture(written)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        open_capture(tmp_path / "none.json")


def test_operators_that_are_not_known_are_refused(written: Path) -> None:
    read = open_capture(written)[1]()
    assert read.record is not None
    text = read.record.model_dump_json().replace("aten.linear.default", "os.system.default")
    strange = Capture(record=type(read.record).model_validate_json(text), unknown=None, again=None, sequence=None)
    with pytest.raises(CaptureError, match=r"no operator 'os\.system\.default'"):
        strange.at(batch=4)


@pytest.mark.parametrize(
    "at",
    [("blocks", 0, "ports", -1, "target"), ("blocks", 0, "nodes", 0, "name")],
    ids=["a port", "a node"],
)
def test_text_that_would_become_code_is_refused(written: Path, at: tuple[Any, ...]) -> None:
    """fx writes names into the code that it compiles."""
    record = open_capture(written)[1]().record
    assert record is not None
    content = json.loads(record.model_dump_json())
    *way, last = at
    place = content
    for step in way:
        place = place[step]
    place[last] = "target=print('planted')"
    with pytest.raises(ValueError, match="should match pattern"):
        type(record).model_validate_json(json.dumps(content))
    words = content["blocks"][0]["nodes"][0]
    place[last] = "target"
    words["kwargs"] = {"x=print('planted'), y": 1}
    with pytest.raises(ValueError, match="should match pattern"):
        type(record).model_validate_json(json.dumps(content))


def test_a_capture_that_is_known_at_no_other_size_is_not_written() -> None:
    nothing = Capture(record=None, unknown="for a reason", again=None, sequence=None)
    with pytest.raises(InputError, match="for a reason"):
        capture_text(nothing, about={})
