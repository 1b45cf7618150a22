"""`autopar.tune` on gloo ranks: it finds a plan that runs, failures are answers, and nothing is left behind."""

import glob
import multiprocessing.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from suites import long, thinned
from torch import nn

import autopar
from autopar.commands import tune_candidates
from autopar.commands.trial import Trainer, TrialJob
from autopar.commands.trial_world import World
from autopar.cost_model.interval import usable_bytes
from autopar.errors import InputError, PlanError
from autopar.ir.degrees import Degrees
from autopar.planning.machine import machine_of
from autopar.report.write import read_source
from autopar.runtime.distributed.launch import Ranks
from autopar.search.measured.result import PlanTrial, TuneResult

PLANTED = Path(__file__).parent / "planted"
TRIAL_S = 30.0
PRICED = """
groups:
  - num_hosts: 1
    devices_per_host: 2
    price_usd_per_device_hour: 1
    device: {name: mine, device_type: cpu, peak_tflops: {float32: 0.05}, memory_gb: 4, memory_bandwidth_gb_per_s: 10,
             power_w: 50}
    in_host: {name: loopback, bandwidth_gb_per_s: 1, latency_us: 100}
"""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4))
        self.register_buffer("scale", torch.full((32,), 2.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + self.scale * block(x)
        return {"loss": x.pow(2).mean()}


def tuned(**how: Any) -> TuneResult:
    asked: dict[str, Any] = {"global_batch": 8, "calibrate": False, "trial_s": TRIAL_S, "trials": 3}
    return autopar.tune(Model(), how.pop("cluster", "2xcpu"), example_inputs={"x": torch.zeros(4, 32)}, **(asked | how))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After a search no rank of this process is there, and no folder in which ranks met."""
    multiprocessing.util.get_temp_dir()  # sockets of the server of ranks, whose paths must be short
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    until = time.monotonic() + 20
    while (more := [*ranks_of_this_process(), *folder.glob("autopar-ranks-*")]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not more


def ranks_of_this_process() -> list[int]:
    """The processes that the server of ranks, a child of this process, has forked."""
    parents: dict[int, int] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.split("/")[2])] = int(Path(path).read_text().rpartition(")")[2].split()[1])
    children = {pid for pid, parent in parents.items() if parent == os.getpid()}
    return [pid for pid, parent in parents.items() if parent in children]


# ---- what it finds ----


def test_it_measures_plans_and_names_the_best() -> None:
    seen: list[PlanTrial] = []
    found = tuned(on_trial=seen.append)
    assert found.best is not None and found.plan is not None and found.step_s is not None
    assert [one.number for one in seen] == [one.number for one in found.tried]
    times = [one.outcome.seconds.median for one in found.tried if one.outcome.seconds is not None]
    assert found.step_s == min(times) and len(times) == len(found.tried) <= 3
    assert found.plan.degrees.world_size == 2 and found.plan.degrees.global_batch == 8
    assert all(one.outcome.peak_bytes is not None and one.outcome.building_s > 0 for one in found.tried)
    assert {one.candidate.degrees["zero"] for one in found.tried} != set()
    assert found.profile is not None and found.profile.steps == len(found.tried)
    assert all(0 <= one.chance <= 1 for one in found.left) and 0 <= found.chance_left <= 1
    data = found.to_dict()
    assert data["kind"] == "autopar tuning result" and len(data["tried"]) == len(found.tried)


def test_a_tuned_plan_is_used_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    found = tuned(trials=1)
    assert found.plan is not None
    local = found.plan.degrees.local_batch
    with Ranks(2, checked=False) as world:
        used = world.run(f"{Path(__file__).stem}:degrees_of_tuned", local)
    assert used == [found.plan.degrees] * 2
    batch = {"x": torch.zeros(local, 32)}
    with pytest.raises(PlanError, match="nobody tuned Model on 1xcpu"):
        try:
            autopar.parallelize(Model(), "1xcpu", example_inputs=batch, plan="tuned")
        finally:
            dist.destroy_process_group()  # other tests of this process need one of their own, or none


def degrees_of_tuned(rank: int, local_batch: int) -> Degrees:
    """On a rank: the degrees that ``plan="tuned"`` has, and a step of them."""
    batch = {"x": torch.zeros(local_batch, 32)}
    parallel = autopar.parallelize(Model(), "2xcpu", example_inputs=batch, plan="tuned")
    assert float(parallel.forward_backward(batch)) >= 0
    return parallel.plan.degrees


def test_a_study_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "tune.log"
    first = tuned(trials=1, study=path)
    again = tuned(trials=1, study=path)
    assert (len(first.tried), len(again.tried)) == (1, 1)
    assert again.tried[0].outcome == first.tried[0].outcome  # nothing was measured again
    more = tuned(trials=2, study=path)
    assert len(more.tried) == 2 or more.is_settled
    kept = read_source(path)
    assert isinstance(kept, TuneResult) and kept.seconds == more.seconds > 0 and kept.notes == more.notes
    with pytest.raises(InputError, match="of another search"):
        tuned(trials=2, study=path, global_batch=16)


@pytest.mark.parametrize(
    "how, error",
    [
        ({"trials": 0}, "trials"),
        ({"budget_s": -1.0}, "budget_s"),
        ({"objective": "speed"}, "must be one of time"),
        ({"study": "study.txt"}, "a journal"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_any_work(how: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError, match=error):
        tuned(**how)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs are here")
def test_devices_that_are_not_here_are_refused() -> None:
    with pytest.raises(InputError, match="autopar plan"):
        autopar.tune(Model(), "8xh100", example_inputs={"x": torch.zeros(4, 32)}, global_batch=8)


def test_several_hosts_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    between = "inter_host: {name: x, bandwidth_gb_per_s: 1, latency_us: 9}\n"
    path.write_text(PRICED.replace("num_hosts: 1", "num_hosts: 2") + between)
    with pytest.raises(
        InputError, match=r"has 2 hosts, and plans are measured on one; .*name the devices of this host"
    ):
        tuned(cluster=str(path))


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_job_of_several_processes_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would start all ranks, and write the same files."""
    monkeypatch.setenv(name, "2")
    with pytest.raises(InputError, match=rf"one of 2 processes \({name}\); start it as one process"):
        tuned()


@pytest.mark.parametrize("objective", ["cost", long("energy"), long("memory")])
def test_other_objectives_may_use_fewer_devices(objective: str, tmp_path: Path) -> None:
    path = tmp_path / "priced.yaml"
    path.write_text(PRICED)
    found = tuned(objective=objective, cluster=str(path))
    assert found.best is not None and found.plan is not None
    best = found.tried[found.best]
    assert best.candidate.num_devices == found.plan.degrees.world_size in (1, 2)
    if objective != "memory":
        values = [
            one.outcome.seconds.median * one.candidate.per_second
            for one in found.tried
            if one.outcome.seconds is not None
        ]
        assert min(values) == pytest.approx(found.tried[found.best].candidate.per_second * (found.step_s or 0))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [long("sgd-momentum", [("SGD", 16)]), ("muon", [("Muon", 6), ("AdamW", 10)])],  # the matrices of three like blocks
)
def test_trials_train_with_the_optimizer_of_the_request(
    name: str, kinds: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    jobs: list[TrialJob] = []
    usual = tune_candidates.Subject.job
    monkeypatch.setattr(tune_candidates.Subject, "job", lambda *given: jobs.append(usual(*given)) or jobs[-1])
    found = tuned(trials=1, cluster="1xcpu", fix={"optimizer": name})
    assert found.plan is not None and found.plan.degrees.optimizer == name
    with Ranks(1, checked=False) as world:
        assert world.run(f"{Path(__file__).stem}:optimizers_of_trial", jobs[0]) == [kinds]


def optimizers_of_trial(rank: int, job: TrialJob) -> list[tuple[str, int]]:
    """On a rank: the optimizers of a trial, and how many parameters each has."""
    found = Trainer(job).optimizers
    return [(type(one).__name__, sum(len(group["params"]) for group in one.param_groups)) for one in found]


# ---- failures ----


def planted(monkeypatch: pytest.MonkeyPatch, fault: str, at: int) -> None:
    """Let the trial of number `at` (0 is the first) fail."""
    usual, count = tune_candidates.Subject.job, [0]

    def job(self: Any, *given: Any) -> TrialJob:
        made = usual(self, *given)
        count[0] += 1
        return replace(made, origin=f"planted_{fault}") if count[0] == at + 1 else made

    monkeypatch.setattr(tune_candidates.Subject, "job", job)
    monkeypatch.setattr(sys, "path", [str(PLANTED), *sys.path])


FAULTS = {"error": ("error", "planted"), "kill": ("killed", "SIGKILL"), "memory": ("oom", "can't allocate memory")}
PLACES = [(fault, *FAULTS[fault], at) for fault in FAULTS for at in range(3)]


@pytest.mark.parametrize("fault, reason, words, at", thinned(PLACES, keep=PLACES[8:]))
def test_a_failed_trial_is_an_answer(
    fault: str, reason: str, words: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, fault, at)
    monkeypatch.setattr("autopar.search.measured.tuning.worth_measuring", lambda found, left: bool(left))
    found = tuned()
    failed = [one for one in found.tried if one.outcome.state == "failed"]
    assert [(one.outcome.reason, one.number) for one in failed] == [(reason, at)]
    assert words in failed[0].outcome.message and "rank 1" in failed[0].outcome.message
    assert failed[0].outcome.seconds is None
    if fault != "memory":  # which rules out the plans that need as much
        assert found.best is not None and len(found.tried) == 3


@pytest.mark.parametrize(
    "at",
    [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)],
    ids=["first", "middle", "last"],
)
def test_a_hanging_trial_ends_within_its_deadline(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "hang", at)
    monkeypatch.setattr("autopar.search.measured.tuning.worth_measuring", lambda found, left: bool(left))
    usual = World.__init__

    def begin(world: World, job: TrialJob, num_ranks: int, *, within_s: float) -> None:
        usual(world, job, num_ranks, within_s=TRIAL_S / 6 if job.origin == "planted_hang" else within_s)

    monkeypatch.setattr(World, "__init__", begin)
    found = tuned(trial_s=TRIAL_S)
    (hung,) = [one for one in found.tried if one.outcome.state == "failed"]
    assert hung.outcome.reason == "timeout" and "did not answer" in hung.outcome.message
    assert hung.number == at and hung.outcome.whole_s < 2 * TRIAL_S
    assert found.best is not None and len(found.tried) == 3


def test_a_best_plan_that_dies_beside_another_trial_does_not_fail_that_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "late_kill", 0)
    monkeypatch.setattr("autopar.search.measured.tuning.worth_measuring", lambda found, left: bool(left))
    found = tuned(trials=2)
    assert [one.outcome.reason for one in found.tried] == ["", ""]
    assert found.best is not None


def test_a_plan_without_room_beside_the_best_plan_is_tried_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second trial lacks memory as long as the ranks of the best plan are there."""
    was_there = tmp_path / "was_there"
    (tmp_path / "planted_once.py").write_text(
        f"import os, pathlib\nfile = pathlib.Path({str(was_there)!r})\n"
        "if os.environ.get('RANK') == '1' and not file.exists():\n    file.touch()\n    raise MemoryError('no room')\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    planted(monkeypatch, "once", 1)
    monkeypatch.setattr("autopar.search.measured.tuning.worth_measuring", lambda found, left: bool(left))
    found = tuned(trials=2)
    assert was_there.exists()
    assert [one.outcome.reason for one in found.tried] == ["", ""]


def test_memory_of_other_processes_ends_the_search_and_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "planted_held.py").write_text(
        "from autopar.commands.trial import CROWDED\nfrom autopar.errors import InputError\n"
        "raise InputError(f'30 GB of 80 GB {CROWDED}: end the processes that hold the rest')\n"
    )
    study = tmp_path / "tune.log"
    with monkeypatch.context() as patched:
        patched.setattr(sys, "path", [str(tmp_path), *sys.path])
        planted(patched, "held", 0)
        with pytest.raises(InputError, match=r"cannot be measured now: .*end the processes that hold the rest"):
            tuned(trials=1, study=study)
    found = tuned(trials=1, study=study)  # the same plan is tried again
    assert found.best == 0 and len(found.tried) == 1


def test_if_every_trial_fails_the_result_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "memory", 0)
    found = tuned(trials=1, fix={"zero": 0, "tp": 1, "pp": 1})
    assert found.best is None and found.plan is None and found.step_s is None
    assert found.tried[0].outcome.reason == "oom"
    # the plan would not fit with the reserve that was learnt
    assert found.profile is not None
    machine = machine_of(autopar.ClusterSpec.preset("2xcpu"), found.profile, "fp32")
    usual = machine_of(autopar.ClusterSpec.preset("2xcpu"), None, "fp32")
    grown = machine.reserve_bytes - usual.reserve_bytes
    assert found.tried[0].candidate.predicted_bytes + grown >= usable_bytes(machine.memory_bytes) * (1 - 1e-6)
