"""`autopar checkpoint`: steps of a folder, and damaged files."""

import hashlib
import json
from pathlib import Path

import pytest
from run import autopar, json_of, refused

from autopar.runtime.checkpoint.folder import publish, step_name
from autopar.runtime.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, write_manifest

FILE, CONTENT = "rank-00000-000.safetensors", b"0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 1 and 2, each with a file of four float32."""
    for step in (1, 2):
        partial = tmp_path / "partial"
        partial.mkdir()
        (partial / FILE).write_bytes(CONTENT)
        chunk = Chunk(file=FILE, offsets=(0,), sizes=(4,))
        manifest = Manifest(
            format=1,
            step=step,
            saved_at="2026-11-25T00:00:00+00:00",
            made_by={"plan": "tp=2"},
            files={FILE: FileEntry(bytes=16, sha256=hashlib.sha256(CONTENT).hexdigest())},
            tensors={"model/w": TensorEntry(dtype="float32", shape=(4,), chunks=(chunk,))},
            plain={},
        )
        write_manifest(partial, manifest)
        publish(tmp_path, partial, tmp_path / step_name(step))
    return tmp_path


def test_steps_are_listed(folder: Path) -> None:
    rows = json_of("checkpoint", str(folder), "--verify")
    assert [(row["step"], row["is_latest"], row["num_bytes"], row["problems"]) for row in rows] == [
        (1, False, 16, []),
        (2, True, 16, []),
    ]
    shown = autopar("checkpoint", str(folder))
    assert shown.exit_code == 0 and "latest" in shown.stdout and "tp=2" in shown.stdout


def test_damage_is_the_exit_status(folder: Path) -> None:
    """A changed byte shows with --verify only; a lost file and a changed manifest always show."""
    (folder / "step-00000001" / FILE).write_bytes(b"0123456789abcdeX")
    assert autopar("checkpoint", str(folder)).exit_code == 0
    result = autopar("checkpoint", str(folder), "--verify", "--json")
    first, second = json.loads(result.stdout)
    assert result.exit_code == 1 and second["problems"] == []
    assert "is damaged" in first["problems"][0] and FILE in first["problems"][0]
    (folder / "step-00000001" / FILE).unlink()
    manifest = folder / "step-00000002/manifest.json"
    manifest.write_text(manifest.read_text().replace("tp=2", "tp=4"))
    result = autopar("checkpoint", str(folder), "--json")
    first, second = json.loads(result.stdout)
    assert result.exit_code == 1
    assert "is missing" in first["problems"][0] and "is damaged" in second["problems"][0]


def test_other_folders(tmp_path: Path) -> None:
    assert "holds no checkpoint" in autopar("checkpoint", str(tmp_path)).stdout
    assert "is no folder" in refused("checkpoint", str(tmp_path / "nowhere"))
