"""Checkpoints under faults: killed saves, full disks, damaged and hostile files, two jobs in one folder."""

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_fault_ranks import copied, plant_pickles
from suites import thinned
from typer.testing import CliRunner

from autopar.cli.app import app_of
from autopar.errors import RankError
from autopar.runtime.distributed.launch import Ranks

FILE = "rank-00000-000.safetensors"
OTHER = "rank-00001-000.safetensors"


@pytest.fixture(scope="module")
def saved(worlds: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    worlds(2).run("checkpoint_fault_ranks:saved_twice", str(folder))
    return folder


@pytest.mark.parametrize("seed", thinned(range(12), keep=(0,)))
def test_a_killed_save(seed: int, worlds: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A rank is killed at a random point of a save. The checkpoint before is intact, and the next job goes on."""
    draw = random.Random(seed)
    who, at = draw.randrange(2), draw.random()
    with Ranks(2, timeout_s=600) as ranks, pytest.raises(RankError, match="SIGKILL"):
        ranks.run("checkpoint_fault_ranks:two_saves", str(tmp_path), who, at, seed % 2 == 1)
    for step, is_equal, later in worlds(2).run("checkpoint_fault_ranks:after_a_kill", str(tmp_path)):
        assert step in (1, 2) and is_equal and later == 3, (who, at, step)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "what the killed save left"


def test_a_full_disk(two_ranks: Ranks, tmp_path: Path) -> None:
    """One rank cannot write: one error on all ranks; what was saved before stays the latest."""
    first, other = two_ranks.run("checkpoint_fault_ranks:full_disk", str(tmp_path))
    assert first == other
    errors = first["errors"]
    for name, parts in {
        "limit": ("the checkpoint was not saved", "step-00000002", "rank 1", OTHER, "File too large"),
        "no space": ("rank 1", OTHER, "No space left on device"),
        "manifest": ("manifest.json", "No space left on device"),
        "in a thread": ("rank 1", "No space left on device"),
        "read-only": ("cannot be written", "Permission denied", "may write to"),
    }.items():
        assert errors[name].startswith("CheckpointError: ") and all(part in errors[name] for part in parts), errors[
            name
        ]
    assert errors["raised once"] == "no error" and errors["finish"] == "no error"
    assert first["left"] == ["latest", "lock", "step-00000001"]
    assert first["latest"] == 1 and first["equal"]


def test_a_parameter_that_is_not_finite(two_ranks: Ranks, tmp_path: Path) -> None:
    first, other = two_ranks.run("checkpoint_fault_ranks:not_finite", str(tmp_path))
    assert first == other and first["latest"] == 1
    assert "the parameter head.weight holds NaN or infinity on rank 1" in first["text"]


def test_ranks_that_do_not_save_the_same(two_ranks: Ranks, tmp_path: Path) -> None:
    first, other = two_ranks.run("checkpoint_fault_ranks:unequal", str(tmp_path))
    assert first == other
    for name, part in {
        "extra": "extra['seconds'] of rank 1 is not that of rank 0",
        "tensor": "extra.mask of rank 1 is not that of rank 0",
        "step": "rank 1 saves step 1",
        "options": "group 0 of AdamW has other options on rank 1",
        "optimizer": "parameters that are not of this model",
        "function": "extra.schedule.f cannot be saved, because it is a builtin_function_or_method",
        "keep_last": "keep_last must be at least 1; got 0",
        "negative": "step must be a whole number from 0 on; got -1",
        "folder": "[]",
    }.items():
        assert part in first[name], first[name]


def rehashed(step: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as somebody would who knows how it is hashed."""
    manifest = json.loads((step / "manifest.json").read_text())["manifest"]
    change(manifest)
    text = json.dumps(manifest, separators=(",", ":"))
    content = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": manifest}
    (step / "manifest.json").write_text(json.dumps(content))


def file_of(step: Path) -> dict[str, Any]:
    content = (step / FILE).read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def swap(step: Path) -> None:
    first, other = (step / FILE).read_bytes(), (step / OTHER).read_bytes()
    (step / FILE).write_bytes(other)
    (step / OTHER).write_bytes(first)


def test_the_plan_is_listed_in_words(saved: Path) -> None:
    result = CliRunner().invoke(app_of(["checkpoint"]), ["checkpoint", str(saved)])
    assert result.exit_code == 0 and " = 2 ranks" in result.stdout and "Degrees(" not in result.stdout


def test_damaged_files(saved: Path, two_ranks: Ranks, tmp_path: Path) -> None:
    """Every damage is found before a tensor is used, by all ranks, and other steps are offered."""
    older = (saved / "step-00000001/manifest.json").read_text()
    damages: dict[str, tuple[Callable[[Path], object], str]] = {
        "truncated": (lambda s: os.truncate(s / FILE, 5000), f"{FILE}: must have"),
        "longer": (lambda s: os.truncate(s / FILE, 500_000), f"{FILE}: must have"),
        "flipped": (lambda s: flip(s / OTHER, -3), f"{OTHER}: is damaged"),
        "flipped header": (lambda s: flip(s / FILE, 20), f"{FILE}: is damaged"),
        "missing": (lambda s: (s / OTHER).unlink(), f"{OTHER}: is missing"),
        "swapped": (swap, "is damaged"),
        "link": (lambda s: ((s / FILE).rename(s / "x"), (s / FILE).symlink_to(s / "x")), f"{FILE}: is a link"),
        "pipe": (lambda s: ((s / FILE).unlink(), os.mkfifo(s / FILE)), f"{FILE}: must be a regular file"),
        "no manifest": (lambda s: (s / "manifest.json").unlink(), "no such file"),
        "manifest flipped": (lambda s: flip(s / "manifest.json", 300), ""),
        "manifest cut": (lambda s: os.truncate(s / "manifest.json", 400), "is not JSON"),
        "other step": (
            lambda s: (s / "manifest.json").write_text(older),
            "must be the step of the folder, 2",
        ),
        "latest": (
            lambda s: (s.parent / "latest").write_text("step-00000007\n"),
            "names step-00000007, which is missing",
        ),
        "latest outside": (lambda s: (s.parent / "latest").write_text("../step-00000002\n"), "names no checkpoint"),
    }
    for name, (damage, _) in damages.items():
        damage(copied(saved, tmp_path / name) / "step-00000002")
    folders = {name: str(tmp_path / name) for name in damages}
    first, other = two_ranks.run("checkpoint_fault_ranks:loads_of_damaged", folders, None)
    assert first.keys() == other.keys() == damages.keys()
    for name, (_, part) in damages.items():
        text, is_unchanged = first[name]
        assert other[name] == first[name] and is_unchanged, name
        assert text.startswith("CheckpointError: ") and part in text, (name, text)
    assert "load another step by its number: 1" in first["flipped"][0]
    loads = two_ranks.run("checkpoint_fault_ranks:loads_of_damaged", {"older": folders["flipped"]}, 1)
    assert [load["older"] for load in loads] == [("no error", False)] * 2


def test_hostile_files(saved: Path, two_ranks: Ranks, tmp_path: Path) -> None:
    """No code of a file runs, no path leads out of the folder, and sizes are bounded."""
    mark, outside = tmp_path / "unpickled", tmp_path / "outside.safetensors"
    outside.write_bytes((saved / "step-00000002" / FILE).read_bytes())

    def renamed(name: str) -> Callable[[dict[str, Any]], None]:
        def change(manifest: dict[str, Any]) -> None:
            manifest["files"][name] = manifest["files"].pop(FILE)
            for tensor in manifest["tensors"].values():
                for chunk in tensor["chunks"]:
                    chunk["file"] = name if chunk["file"] == FILE else chunk["file"]

        return change

    def pickled(step: Path) -> None:
        plant_pickles(step, mark)
        rehashed(step, lambda manifest: manifest["files"].update({FILE: file_of(step)}))

    def first_tensor(**changes: Any) -> Callable[[Path], None]:
        def change(manifest: dict[str, Any]) -> None:
            manifest["tensors"]["model/head.weight"].update(changes)

        return lambda step: rehashed(step, change)

    hostile: dict[str, tuple[Callable[[Path], object], str]] = {
        "pickles": (pickled, "is too small"),
        "traversal": (lambda s: rehashed(s, renamed("../outside.safetensors")), "plain names of .safetensors files"),
        "absolute": (lambda s: rehashed(s, renamed(str(outside))), "plain names of .safetensors files"),
        "linked step": (lambda s: (s.rename(s.parent / "real"), s.symlink_to(s.parent / "real")), "which is missing"),
        "huge": (first_tensor(shape=[10**9, 10**9]), "is not made up of its chunks"),
        "no chunks": (first_tensor(chunks=[]), "is not made up of its chunks"),
        "dtype": (first_tensor(dtype="object"), "has an unknown dtype"),
        "deep": (lambda s: (s / "manifest.json").write_text("[" * 100_000), "nested too deeply"),
        "large": (lambda s: os.truncate(s / "manifest.json", 2**31), "must be at most"),
        "unknown key": (lambda s: rehashed(s, lambda m: m.update(code="print(1)")), "is not a known key"),
        "plain": (lambda s: rehashed(s, lambda m: m["plain"].update(extra={"dict": [["a", {"exec": "1"}]]})), ""),
        "format": (lambda s: rehashed(s, lambda m: m.update(format=2)), "has format 2"),
    }
    for name, (plant, _) in hostile.items():
        plant(copied(saved, tmp_path / name) / "step-00000002")
    plant_pickles(copied(saved, tmp_path / "beside") / "step-00000002", mark)
    (tmp_path / "beside/step-00000002" / FILE).write_bytes(outside.read_bytes())
    folders = {name: str(tmp_path / name) for name in (*hostile, "beside")}
    first, other = two_ranks.run("checkpoint_fault_ranks:loads_of_damaged", folders, None)
    for name, (_, part) in hostile.items():
        text, is_unchanged = first[name]
        assert other[name][0] == text and text.startswith("CheckpointError: ") and part in text, (name, text)
        assert is_unchanged, name
    assert first["beside"][0] == "no error"  # a pickle that lies beside the files is not read
    assert not mark.exists()


def test_a_file_that_is_lost_while_it_is_loaded(saved: Path, two_ranks: Ranks, tmp_path: Path) -> None:
    """The hash was right, and then one rank cannot read: one error on all ranks. The next load finds the file."""
    folder = copied(saved, tmp_path / "saved")
    (text, again), other = two_ranks.run("checkpoint_fault_ranks:file_lost_while_loading", str(folder), OTHER)
    assert other == (text, again) and again == "no error"
    assert text.startswith("CheckpointError: reading ") and f"{OTHER} cannot be read" in text, text
    assert "the model may hold a part of it" in text


def test_checkpoints_of_something_else(saved: Path, two_ranks: Ranks) -> None:
    """Every difference is listed, and the model is as it was."""
    first, other = two_ranks.run("checkpoint_fault_ranks:loads_of_others", str(saved))
    assert first == other
    for name, parts in {
        "class": ("optimizer 0: must be AdamW, as in the checkpoint; got 'SGD'",),
        "none": ("optimizers: must be 1, as in the checkpoint; got 0 (weights_only=True loads the model alone)",),
        "two": ("optimizers: must be 1",),
        "groups": ("must have 1 groups, as in the checkpoint",),
        "fewer": ("optimizer 0, group 0: lacks head.weight",),
        "extra": ("extra['schedule']: is not in the checkpoint",),
        "no object": ("extra['epoch'] has no load_state_dict()",),
        "tied": ("model/head.weight: is in the checkpoint only", "lacks head.weight"),
    }.items():
        text, is_unchanged = first[name]
        assert is_unchanged and all(part in text for part in parts), (name, text)


def test_kept_and_replaced_steps(two_ranks: Ranks, tmp_path: Path) -> None:
    first, other = two_ranks.run("checkpoint_fault_ranks:kept", str(tmp_path))
    assert first == other
    assert first["kept"] == ["latest", "lock", "step-00000003", "step-00000004", "step-00000005"]
    assert first["again"] == ["latest", "lock", "step-00000003", "step-00000004", "step-00000005.1"]
    assert first["older"] == ("no error", True)
    assert first["went back"] == (["latest", "lock", "step-00000003", "step-00000004.1", "step-00000005.1"], 4)
    assert first["latest"] and first["newest"] and first["weights"] == ("no error", True)


def test_two_jobs_in_one_folder(worlds: Callable[[int], Ranks], tmp_path: Path) -> None:
    """The second job refuses and names the first. The lock of a job that was killed is stale."""
    with Ranks(1) as ranks:
        (pid,) = ranks.run("checkpoint_fault_ranks:locked", str(tmp_path), 1)
        first, other = worlds(2).run("checkpoint_fault_ranks:refused", str(tmp_path))
        assert first == other and f"is in use by process {pid} on {os.uname().nodename}" in first
        os.kill(int(pid), 9)
    assert worlds(2).run("checkpoint_fault_ranks:refused", str(tmp_path)) == ["no error"] * 2
