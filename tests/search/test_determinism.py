"""The same search twice, in processes that hash differently: the same plan, byte for byte, from the same trials."""

import os
import subprocess
import sys
from pathlib import Path

import plan_worker


def test_the_same_plan_in_another_process(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, plan_worker.__file__, str(tmp_path / f"{seed}.json")],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "27")
    ]
    printed = [one.communicate()[0] for one in processes]
    assert [one.returncode for one in processes] == [0, 0]
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "27.json").read_bytes()
    assert printed[0] == printed[1]
    assert b"sampled" in printed[0]
