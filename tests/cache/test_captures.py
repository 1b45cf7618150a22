"""Kept captures: when a file is used, when it is not, and the messages."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from autopar.cache import captures as capture_cache
from autopar.cache.captures import CapturedModel, captured_model
from autopar.cache.store import cache_folder
from autopar.capture import any_size, program
from autopar.errors import InputError
from autopar.runtime.distributed.launch import Ranks

SMALL = {"layers": 2, "hidden": 64, "seq_len": 16}


def gpt2(folder: Path | None, **options: object) -> CapturedModel:
    return captured_model("gpt2", folder=folder, **{**SMALL, **options})  # type: ignore[arg-type]


def test_the_second_time_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gpt2(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    with monkeypatch.context() as patched:
        patched.setattr(capture_cache, "resolve_model", None)
        second = gpt2(tmp_path)
    assert second.capture.at(batch=6).fingerprint == first.capture.at(batch=6).fingerprint
    assert (second.name, second.notes) == (first.name, first.notes)
    assert second.capture.at(batch=1).batch == 1  # needs the model, which is built then


def test_other_sizes_are_other_captures(tmp_path: Path) -> None:
    gpt2(tmp_path)
    other = gpt2(tmp_path, seq_len=20)
    assert other.capture.at(batch=4).sequence == 20
    assert len(list(tmp_path.iterdir())) == 2


def test_other_versions_are_other_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cache, "capture_versions", lambda: {"torch": "0"})
    gpt2(tmp_path)
    monkeypatch.setattr(capture_cache, "capture_versions", lambda: {"torch": "1"})
    gpt2(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_file_is_passed_over_with_a_note(tmp_path: Path) -> None:
    gpt2(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(whole[:1000])
    found = gpt2(tmp_path)
    assert [note for note in found.notes if "damaged" in note and str(path) in note]
    assert path.read_text() == whole
    assert not [note for note in gpt2(tmp_path).notes if "damaged" in note]


def test_a_folder_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = gpt2(tmp_path / "file" / "captures")
    assert [note for note in found.notes if "not kept" in note]


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    gpt2(None)
    assert not list(tmp_path.iterdir())


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("AUTOPAR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "autopar" / "captures"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to pass over
    assert cache_folder() == Path.home() / ".cache" / "autopar" / "captures"


FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).sum()

def make():
    return Model(), {"x": torch.zeros(3, 4)}
"""


def test_a_factory_is_kept_until_its_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it kept has the program and captures other sizes. The search of a factory's model is not kept."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    captures = mock.Mock(wraps=program.capture_twice)
    monkeypatch.setattr(any_size, "capture_twice", captures)

    def fingerprint(text: str) -> str:
        (tmp_path / "own_factory.py").write_text(text)
        sys.modules.pop("own_factory", None)
        found = captured_model("own_factory:make", folder=tmp_path / "captures")
        assert (found.local_batch, found.digest) == (3, None)
        return found.capture.at(batch=6).fingerprint

    first = fingerprint(FACTORY)
    assert fingerprint(FACTORY) == first and captures.call_count == 1
    assert fingerprint(FACTORY.replace(".sum()", ".sum() * 2")) != first and captures.call_count == 2


def test_errors_are_those_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lama3-8b"):
        captured_model("lama3-8b", folder=tmp_path)
    with pytest.raises(InputError, match="dtype"):
        captured_model("gpt2", folder=tmp_path, dtype="float7")


@pytest.mark.long
def test_a_warm_plan_imports_no_transformers(tmp_path: Path) -> None:
    program = """
import sys
from autopar.cli import main
sys.argv = "autopar plan gpt2 --layers 2 --hidden 64 --seq-len 16 --cluster 4xh100 --tp 2 --json".split()
try:
    main()
finally:
    heavy = {"transformers", "torch._dynamo", "torch.distributed.tensor"} & set(sys.modules)
    print(sorted(heavy), file=sys.stderr)
"""
    environment = os.environ | {"AUTOPAR_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[1].stderr.strip().splitlines()[-1] == "[]"
    plans = [json.loads(run.stdout)["plan"] for run in runs]
    assert plans[0] == plans[1]


def test_a_process_that_captured_nothing_reads_operators_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are chosen by one output of `topk`, an operator that the capture has defined."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    made = of_experts(0, tmp_path)
    with Ranks(1) as other:
        assert other.run(f"{Path(__file__).stem}:of_experts", tmp_path) == [made]


def of_experts(rank: int, folder: Path) -> str:
    """The fingerprint of a program, captured or read."""
    made = captured_model("mixtral-8x7b", layers=1, hidden=64, seq_len=16, folder=folder)
    return made.capture.at(batch=6).fingerprint
