"""The same search twice, in processes that hash differently: the same plan, byte for byte, from the same trials."""

import os
import subprocess
import sys
from pathlib import Path

import plan_worker


def test_the_same_plan_in_another_process(tmp_path: Path) -> None:
    command = [sys.executable, plan_worker.__file__, str(tmp_path / "other.json")]
    other = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "1"}, check=True)
    printed = plan_worker.search(tmp_path / "here.json")
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "other.json").read_bytes()
    assert f"{printed}\n" == other.stdout.decode()
    assert "sampled" in printed
