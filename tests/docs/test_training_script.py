"""The script of docs/training_script.md is `examples/train.py`. A killed run goes on exactly as a whole run."""

import re
from pathlib import Path

import forked
import pytest

from autopar.runs.record import Line, read_metrics
from autopar.runs.status import run_status

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train.py"
SMALL = {"STEPS": 8, "WARM_UP": 2, "EVALUATE_EVERY": 4, "SAVE_EVERY": 2}
DIES = 5
KILLED = f"""
import os, runpy, signal, sys, time
import autopar
from autopar.runtime.checkpoint.folder import latest_folder

log = autopar.Run.log

def dying(run, step, *arguments, **options):
    log(run, step, *arguments, **options)
    if step == {DIES}:
        while getattr(latest_folder(run.checkpoints), 'step', 0) < {DIES - 1}: time.sleep(0.05)  # in the background
        os.kill(os.getpid(), signal.SIGKILL)  # as a machine that is taken away

autopar.Run.log = dying
runpy.run_path("train.py", run_name="__main__")
"""


def lines(run: Path) -> list[Line]:
    return list(read_metrics(run).lines)


def test_the_page_shows_the_script() -> None:
    page = (ROOT / "docs" / "training_script.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert SCRIPT.read_text() in blocks


def test_a_killed_run_goes_on_as_a_whole_run(tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    names = ", ".join(SMALL)
    text, count = re.subn(rf"^{names} = .*$", f"{names} = {', '.join(map(str, SMALL.values()))}", text, flags=re.M)
    assert count == 1
    assert '{"tp": 2,' in text and "num_hidden_layers=4" in text
    text = text.replace('{"tp": 2,', '{"tp": 1,').replace("num_hidden_layers=4", "num_hidden_layers=1")  # on two ranks
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
    given = [str(ROOT / "README.md")]
    forked.run(tmp_path / "whole" / "train.py", given, tmp_path / "whole", 2)
    killing = tmp_path / "killed" / "killing.py"
    killing.write_text(KILLED)
    with pytest.raises(AssertionError, match="-9"):
        forked.run(killing, given, tmp_path / "killed", 2)
    killed, whole = (tmp_path / name / "runs" / "first" for name in ("killed", "whole"))
    assert run_status(killed).state == "killed"
    assert [line.step for line in lines(killed)] == list(range(1, DIES + 1))
    forked.run(tmp_path / "killed" / "train.py", given, tmp_path / "killed", 2)
    values = [[(one.step, one.loss, one.learning_rate, one.gradient_norm, one.extra) for one in lines(run)]
              for run in (killed, whole)]  # fmt: skip
    assert values[0] == values[1]
    assert [one[0] for one in values[0]] == list(range(1, 9))
    assert values[0][-1][1] < values[0][0][1] - 0.2
    now = run_status(killed)
    assert (now.state, now.num_starts, now.num_replaced) == ("done", 2, DIES - 4)  # it went on from step 4
    assert now.predicted is not None
    assert now.predicted.step_interval_s[0] < now.predicted.step_s < now.predicted.step_interval_s[1]
