"""Measured search over several hosts, played by processes of this machine: agents, failures, one result for all."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from autopar.commands.hosts import Job, _local_ranks, is_controller, job_of
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec

WORKER = Path(__file__).with_name("hosts_worker.py")
CLUSTER = """
groups:
  - {num_hosts: 2, devices_per_host: 1, device: cpu}
inter_host: {name: loopback, bandwidth_gb_per_s: 1, latency_us: 100}
"""
pytestmark = pytest.mark.timeout(400)
JOB = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1", "GROUP_RANK": "1"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def of_torchrun(host: int, port: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "RANK": str(host),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def started(cluster: str, environment: Mapping[str, str], *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), cluster, *more],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(tmp_path: Path, *more: str, environments: Sequence[Mapping[str, str]] = ()) -> list[Any]:
    """What the processes of two hosts return."""
    path, port = tmp_path / "two.yaml", free_port()
    path.write_text(CLUSTER)
    both = [started(str(path), one, *more) for one in environments or [of_torchrun(host, port) for host in (0, 1)]]
    ended = [one.communicate(timeout=300) for one in both]
    assert [one.returncode for one in both] == [0, 0], [errors[-2000:] for _, errors in ended]
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def test_two_hosts_measure_together_and_both_have_the_result(tmp_path: Path) -> None:
    first, second = results(tmp_path)
    assert first == second
    assert first["step_s"] > 0
    assert all(one["candidate"]["num_devices"] == 2 for one in first["tried"])


@pytest.mark.parametrize("fault, reason", [("kill", "killed"), pytest.param("error", "error", marks=pytest.mark.long)])
def test_a_failure_on_another_host_is_an_answer(fault: str, reason: str, tmp_path: Path) -> None:
    first, second = results(tmp_path, fault)
    assert first == second
    failed, ran = first["tried"]
    assert failed["outcome"]["reason"] == reason and "rank 1" in failed["outcome"]["message"]
    assert ran["outcome"]["seconds"]["median"] == first["step_s"]
    assert failed["outcome"]["whole_s"] < 60


def test_a_job_of_torchrun_on_one_host() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER), "2xcpu"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert first == second and first["step_s"] > 0


def test_ranks_are_numbered_host_by_host() -> None:
    spec = ClusterSpec.preset("16xh100")
    assert _local_ranks(spec, 16) == [range(8), range(8, 16)]
    assert _local_ranks(spec, 4) == [range(4), range(4, 4)]


def test_the_place_of_a_process_is_read_from_torchruns_variables() -> None:
    found = job_of(JOB | {"LOCAL_RANK": "0"})
    assert isinstance(found, Job) and found.is_agent and not found.is_controller and found.num_hosts == 2
    other = job_of(JOB | {"LOCAL_RANK": "1"})
    assert other is not None and not other.is_agent
    assert job_of({}) is None
    with pytest.raises(InputError, match="torchrun"):
        job_of({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})


SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURM_JOB_ID": "77",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("localhost", "localhost"),
        ("node[3-4]", "node3"),
        ("gpu[007-012,15],cpu1", "gpu007"),
        ("gpu[5,7]", "gpu5"),
        ("a[1-2]-ib,b", "a1-ib"),
        ("one,two", "one"),
    ],
)
def test_the_processes_of_srun_meet_on_the_first_host(hosts: str, first: str) -> None:
    found = job_of(SLURM | {"SLURM_STEP_NODELIST": hosts, "SLURM_NODEID": "1"})
    assert found == Job(
        address=first, port=20_077, host=1, num_hosts=2, num_processes=2, is_agent=True, has_store=False
    )
    assert not is_controller(SLURM | {"SLURM_NODEID": "1"}) and is_controller(SLURM | {"SLURM_NODEID": "0"})


def test_what_srun_is_not() -> None:
    alone = {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}  # of a batch script, which runs once
    assert job_of(alone) is None and is_controller(alone)
    assert job_of(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}) is None
    with pytest.raises(InputError, match="--ntasks-per-node 1"):
        job_of(SLURM | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_NODEID": "0"})


@pytest.mark.long
def test_two_hosts_of_srun(tmp_path: Path) -> None:
    """The variables of srun alone are enough, and the devices of both hosts are calibrated together."""
    slurm = SLURM | {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    first, second = results(tmp_path, "calibrate", environments=[slurm | {"SLURM_NODEID": str(i)} for i in (0, 1)])
    assert first == second and first["step_s"] > 0
    assert any("calibrated" in note for note in first["notes"])
