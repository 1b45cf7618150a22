"""The same search twice, in processes that hash differently: the same plan, byte for byte, from the same trials."""

import os
from pathlib import Path

from plan_worker import searched

from autopar.runtime.distributed.launch import Ranks


def test_the_same_plan_in_another_process(tmp_path: Path) -> None:
    with Ranks(1) as other:
        ((seed, trials),) = other.run("plan_worker:searched", tmp_path / "other.json")
    assert seed != hash("text") or "PYTHONHASHSEED" in os.environ
    assert searched(0, tmp_path / "here.json") == (hash("text"), trials)
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "other.json").read_bytes()
    assert "sampled" in trials
