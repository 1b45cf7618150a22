"""`autopar tune` from the outside: what it prints and writes, SIGINT in the middle, two runs on one study."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from run import autopar, json_of, refused

from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan

ASKED = ("gpt2", "-c", "2xcpu", "--layers", "2", "--hidden", "32", "--seq-len", "16", "--global-batch", "4")
CLUSTER = "groups:\n  - {num_hosts: 1, devices_per_host: 2, device: cpu}\n"
NO_CALIBRATION = "--no-calibrate"
INTERRUPTED = 130


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", "autopar", "tune", *ASKED, NO_CALIBRATION, *more]


def test_the_profile_stays_with_the_cluster_file(tmp_path: Path) -> None:
    cluster = tmp_path / "mine.yaml"
    cluster.write_text(CLUSTER)
    asked = ("tune", *ASKED, NO_CALIBRATION, "-c", str(cluster), "--trials", "1")
    assert autopar(*asked).exit_code == 0
    profile = tmp_path / "mine.profile.yaml"
    assert "measured by autopar tune" in profile.read_text()
    assert "profile: ./mine.profile.yaml" in cluster.read_text()
    spec = ClusterSpec.load(cluster)
    assert spec.profile == str(profile) and spec.num_devices == 2
    before = cluster.read_text()
    assert autopar(*asked).exit_code == 0
    assert cluster.read_text() == before


@pytest.mark.parametrize(
    "more, words",
    [
        (("--budget", "soon"), "--budget"),
        (("--trials", "0"), "trials"),
        (("-c", "8xh100"), "autopar plan"),
        (("--objective", "speed"), "objective"),
    ],
    ids=str,
)
def test_bad_input_is_one_message(more: tuple[str, ...], words: str) -> None:
    assert words in refused("tune", *ASKED, NO_CALIBRATION, *more)


def trials_of(path: Path) -> list[Any]:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    return optuna.load_study(storage=storage, study_name="autopar").get_trials()


def test_sigint_ends_all_ranks_and_a_second_run_goes_on(tmp_path: Path) -> None:
    plan, profile, study, page = (tmp_path / name for name in ("plan.json", "profile.yaml", "tune.log", "tuned.html"))
    process = subprocess.Popen(
        command("--trials", "4", "--study", str(study)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    while "trial 1" not in (line := process.stdout.readline()):
        assert process.poll() is None
    assert re.search(r"trial 1: dp 2.*: \d+(\.\d)? .?s \(.* to .*\), predicted", line)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == INTERRUPTED and "Traceback" not in errors
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    assert not children.stdout
    before = trials_of(study)
    options = ("tune", *ASKED, NO_CALIBRATION, "--trials", "2", "--study", str(study))
    done = autopar(*options, "--out", str(plan), "--profile-out", str(profile))
    assert done.exit_code == 0, done.stderr
    assert "best" in done.stdout and f"written to {plan}" in done.stdout.replace("\n", " ").replace("  ", " ")
    assert Plan.load(plan).degrees.world_size == 2
    assert "measured by autopar tune" in profile.read_text()
    assert autopar("plan", *ASKED, "--profile", str(profile)).exit_code == 0  # the next search starts from it
    assert autopar("report", str(study), "-o", str(page)).exit_code == 0
    assert "measured" in page.read_text()
    _every_trial_is_whole(study)
    data = json_of(*options)
    assert data["kind"] == "autopar tuning result"
    assert data["tried"][0]["number"] == before[0].number and len(data["tried"]) <= 2
    assert data["step_s"] in [trial["outcome"]["seconds"]["median"] for trial in data["tried"]]
    assert data["plan"]["degrees"]["dp_shard"] >= 1 and data["why"]


def _every_trial_is_whole(study: Path) -> None:
    for one in trials_of(study):
        if "outcome" not in one.user_attrs:  # it was interrupted
            continue
        assert one.params["tp"] in (1, 2) and "zero" in one.params
        outcome = one.user_attrs["outcome"]
        low, high = one.user_attrs["predicted_interval_s"]
        assert 0 < low < one.user_attrs["predicted_s"] < high
        assert one.user_attrs["tokens_per_s"] == pytest.approx(4 * 16 / outcome["seconds"]["median"])
        assert outcome["peak_bytes"] > 0
        assert (one.state.name == "COMPLETE") == (outcome["state"] == "complete")
        if one.state.name == "COMPLETE":
            assert one.value == outcome["seconds"]["median"]


@pytest.mark.long
def test_two_runs_share_a_study_and_measure_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "tune.log"
    both = [
        subprocess.Popen(
            command("--trials", "3", "--study", str(path), "--json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ended = [one.communicate(timeout=600) for one in both]
    assert [one.returncode for one in both] == [0, 0], [errors for _, errors in ended]
    done = [one for one in trials_of(path) if "outcome" in one.user_attrs]
    texts = [one.user_attrs["degrees"] for one in done]
    assert len(set(texts)) == len(texts) >= 2
    assert not [one for one in trials_of(path) if not one.state.is_finished() and "owner" in one.user_attrs]


SCRIPT = """
import os
import torch
from torch import nn
import autopar

@torch.library.custom_op("test_tune_command::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

doubled.register_fake(lambda x: torch.empty_like(x))
doubled.register_autograd(lambda ctx, grad: grad * 2)

class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return {"loss": self.second(doubled(torch.tanh(self.first(x)))).pow(2).mean()}

torch.manual_seed(0)
print("the script's own output")
batch = {"x": torch.ones(8, 32)}
parallel = autopar.parallelize(Net(), "2xcpu", example_inputs=batch, plan="tuned")
loss = parallel.forward_backward(parallel.local_batch(batch))
if os.environ["RANK"] == "0":
    print("trained", parallel.plan.degrees.zero, float(loss) > 0)
"""


@pytest.mark.long
def test_a_training_script_is_tuned_and_then_trained(tmp_path: Path) -> None:
    """The script has an operator of its own, which the ranks of trials register too."""
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    env = os.environ | {"AUTOPAR_CACHE_DIR": str(tmp_path / "cache")}
    more = ["-c", "2xcpu", "--global-batch", "8", "--trials", "1", NO_CALIBRATION, "--json"]
    asked = [sys.executable, "-m", "autopar", "tune", str(file), *more]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["model"] == "Net" and found["best"] == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    trained = subprocess.run(torchrun, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert f"trained {found['plan']['degrees']['zero']} True" in trained.stdout, trained.stderr[-2000:]
    assert "a script decides its own sizes" in refused("tune", str(file), *more, "--layers", "2")
