"""Worlds of ranks over several hosts: one agent per host starts and ends the ranks of its host.

    torchrun --nnodes 2 --nproc-per-node 1 ... -m autopar tune ...
    srun --ntasks-per-node 1 python -m autopar tune ...

Every process of the job runs the command. The first process of each host becomes the agent of its host, and the others
of the host wait for the result. The controller is in the process of the first agent. It numbers commands in the job's
store, and all agents carry them out in this order:

    start       start the ranks of this host for a world
    run         run a function on them, and answer with its results or with the failure
    close       end them
    end         end the agent

If one host fails, the controller asks the others to stop, because their ranks wait for ranks that are gone. The first
failure that arrives is the cause. torchrun's own restart is no tool for this: it ends the whole job.
"""

import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from autopar.errors import InputError, RankError
from autopar.ir.cluster import ClusterSpec
from autopar.runtime.distributed.launch import Meeting, Ranks

# the first host of Slurm's list: gpu07 of gpu[07-08,11],cpu1 and a1-ib of a[1-4]-ib
_FIRST_HOST = re.compile(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\]([^,]*))?")
LEAST_PORT, NUM_PORTS = 20_000, 10_000
PREFIX, RESULT, LEFT = "autopar-agents", "result", "left"
POLL_S = 0.02
SLACK_S = 15.0  # for an answer beyond the time of the ranks themselves
_TIMEOUT = timedelta(hours=24)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """This process's place in a job of several processes."""

    address: str
    port: int
    host: int
    num_hosts: int
    num_processes: int
    is_agent: bool
    has_store: bool  # torchrun keeps the store, else the first agent does

    @property
    def is_controller(self) -> bool:
        """Whether this process controls the search."""
        return self.is_agent and self.host == 0


def job_of(environment: Mapping[str, str]) -> Job | None:
    """This process's place in a job of torchrun or of Slurm's srun. None without a job, or if it is the only process.

    Args:
        environment: Where the variables of the job are looked up.

    Raises:
        InputError: The variables do not say where the processes meet, or hosts have unlike numbers of processes.
    """
    if "WORLD_SIZE" not in environment and "SLURM_STEP_NUM_TASKS" in environment:
        environment = {**environment, **_of_slurm(environment)}
    world, local = int(environment.get("WORLD_SIZE", "1")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if world == 1:
        return None
    if "MASTER_ADDR" not in environment or "GROUP_RANK" not in environment:
        raise InputError("plans of a job are measured under torchrun or srun, which say where the processes meet")
    return Job(
        address=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        host=int(environment["GROUP_RANK"]),
        num_hosts=world // local,
        num_processes=world,
        is_agent=environment.get("LOCAL_RANK", "0") == "0",
        has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def is_controller(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process controls the search of its job, or is in no job."""
    job = job_of(environment)
    return job is None or job.is_controller


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a process that srun started. The processes meet on the first host of the step.

    Source: https://slurm.schedmd.com/srun.html, section "Output environment variables".

    >>> found = _of_slurm({
    ...     "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]",
    ...     "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1234",
    ... })
    >>> found["MASTER_ADDR"], found["MASTER_PORT"], found["LOCAL_WORLD_SIZE"], found["GROUP_RANK"]
    ('gpu07', '21234', '4', '1')
    """
    world, hosts = (int(environment[f"SLURM_STEP_NUM_{name}"]) for name in ("TASKS", "NODES"))
    if world % hosts:
        raise InputError(f"srun started {world} processes on {hosts} hosts; start one for each: --ntasks-per-node 1")
    first = _FIRST_HOST.match(environment["SLURM_STEP_NODELIST"])
    assert first is not None  # it matches any text
    port = LEAST_PORT + int(environment["SLURM_JOB_ID"]) % NUM_PORTS  # two jobs of a host have unlike ports
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world // hosts),
        "GROUP_RANK": environment["SLURM_NODEID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": environment.get("MASTER_ADDR", "".join(filter(None, first.groups()))),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    kind: str
    world: int
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The results of the ranks of one host, or the message of what failed and the rank."""

    results: tuple[Any, ...] = ()
    failure: str = ""
    rank: int = 0


def _store(job: Job, *, first: bool = False) -> Any:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    is_master = first and job.host == 0 and not job.has_store
    store = TCPStore(job.address, job.port, is_master=is_master, timeout=_TIMEOUT, wait_for_workers=False)
    return PrefixStore(PREFIX, store)


# ---- agents ----


class Agent:
    """The agent of one host. `serve` carries out commands until the controller ends it."""

    def __init__(self, job: Job) -> None:
        self.job, self.worlds = job, dict[int, Ranks | None]()  # None: this host has no rank of the world
        self.store = _store(job)

    def serve(self) -> None:
        """Carry out commands in their order."""
        number = 0
        with ThreadPoolExecutor(max_workers=1) as pool:
            while True:
                command: _Command = pickle.loads(self.store.get(f"command-{number}"))
                if command.kind == "end":
                    break
                done = pool.submit(self._carried_out, command)
                while not wait([done], timeout=POLL_S).done:
                    if self.store.check([f"stop-{number}"]):
                        self._stop(command.world, done)
                self.store.set(f"answer-{number}-{self.job.host}", pickle.dumps(done.result()))
                number += 1
        for world in filter(None, self.worlds.values()):
            world.close()

    def _carried_out(self, command: _Command) -> _Answer:
        try:
            if command.kind == "start":
                how = command.arguments[self.job.host]
                self.worlds[command.world] = Ranks(**how) if how["local"] else None
                return _Answer()
            world = self.worlds.get(command.world)
            if command.kind == "close":
                self.worlds.pop(command.world, None)
                if world is not None and world.is_open:
                    world.close()
                return _Answer()
            if world is None:
                return _Answer() if command.world in self.worlds else _Answer(failure="its ranks are gone")
            target, arguments = command.arguments
            return _Answer(results=tuple(world.run(target, *arguments)))
        except RankError as error:
            return _Answer(failure=str(error), rank=error.rank or 0)
        except Exception as error:  # such as a function that cannot be found
            return _Answer(failure=f"{type(error).__name__}: {error}")

    def _stop(self, number: int, done: "Future[_Answer]") -> None:
        """End the ranks of a world while they run something."""
        world = self.worlds.get(number)
        while not done.done():
            if world is not None:
                with suppress(Exception):  # the thread that runs them closes them too
                    world.close()
            wait([done], timeout=POLL_S)


def in_job(body: Callable[["Hosts | None"], T], environment: Mapping[str, str] = os.environ) -> T:
    """Run a function in the controller of a job, and give its result to every process of the job.

    Args:
        body: The function. It gets the hosts of the job, or None without a job.
        environment: Where torchrun's variables are looked up.

    Raises:
        InputError: In the other processes, if the function failed in the controller.
    """
    job = job_of(environment)
    if job is None:
        return body(None)
    if job.is_controller:
        return _controlled(job, body)
    if job.is_agent:
        Agent(job).serve()
    store = _store(job)
    kind, value = pickle.loads(store.get(RESULT))
    store.add(LEFT, 1)
    if kind == "failed":
        raise InputError(f"the first process of the job failed: {value}")
    found: T = value
    return found


def _controlled(job: Job, body: Callable[["Hosts | None"], T]) -> T:
    hosts = Hosts(job)
    try:
        found = body(hosts)
        hosts.store.set(RESULT, pickle.dumps(("done", found)))
        return found
    except BaseException as error:
        hosts.store.set(RESULT, pickle.dumps(("failed", str(error) or type(error).__name__)))
        raise
    finally:
        hosts.close()


# ---- the controller ----


class Hosts:
    """The hosts of a job. `open` starts a world of ranks on them."""

    def __init__(self, job: Job) -> None:
        self.job, self._commands, self._worlds = job, 0, 0
        self.store = _store(job, first=True)
        self._own = threading.Thread(target=Agent(job).serve, daemon=True)
        self._own.start()

    def open(self, cluster: ClusterSpec, num_ranks: int, *, timeout_s: float, device_type: str) -> "HostsWorld":
        """Start `num_ranks` ranks, numbered host by host as the cluster's devices are."""
        self._worlds += 1
        meeting = Meeting(host=self.job.address, port=self.job.port, prefix=f"autopar-world-{self._worlds}")
        local = _local_ranks(cluster, num_ranks) + [range(0)] * self.job.num_hosts
        each = [
            {
                "world_size": num_ranks, "timeout_s": timeout_s, "checked": False, "device_type": device_type,
                "local": local[host], "meeting": meeting,
            }
            for host in range(self.job.num_hosts)
        ]  # fmt: skip
        world = HostsWorld(self, self._worlds, within_s=2 * timeout_s)
        world.ask("start", tuple(each))
        return world

    def send(self, command: _Command) -> int:
        """Put a command into the store. Returns its number."""
        number = self._commands
        self._commands += 1
        self.store.set(f"command-{number}", pickle.dumps(command))
        return number

    def close(self) -> None:
        """End all agents and their ranks, and wait until every process has the result: the store may be here."""
        self.send(_Command(kind="end", world=0))
        self._own.join(SLACK_S)
        until = time.monotonic() + SLACK_S
        while self.store.add(LEFT, 0) < self.job.num_processes - 1 and time.monotonic() < until:
            time.sleep(POLL_S)


class HostsWorld:
    """The ranks of one world over several hosts, with the methods of `Ranks` that a trial needs."""

    def __init__(self, hosts: Hosts, number: int, *, within_s: float) -> None:
        self._hosts, self._number, self._within_s = hosts, number, within_s
        self.is_open = True

    def run(self, target: str, *arguments: Any) -> list[Any]:
        """Run a function on every rank, as `Ranks.run`; results in rank order."""
        return [one for answer in self.ask("run", (target, arguments)) for one in answer.results]

    def close(self) -> None:
        """End all ranks."""
        if self.is_open:
            self.is_open = False
            self._answers(self._hosts.send(_Command(kind="close", world=self._number)))

    def ask(self, kind: str, arguments: tuple[Any, ...]) -> Sequence[_Answer]:
        """Let all hosts carry out a command. Raises `RankError` with the first failure, and ends the world."""
        number = self._hosts.send(_Command(kind=kind, world=self._number, arguments=arguments))
        answers = self._answers(number)
        failed = next((one for _, one in answers if one.failure), None)
        if failed is not None:
            self.close()
            raise RankError(failed.failure, rank=failed.rank)
        return [one for _, one in sorted(answers, key=lambda each: each[0])]

    def _answers(self, number: int) -> list[tuple[int, _Answer]]:
        """The answers of all hosts in the order in which they arrive. After a failure the others are told to stop."""
        store, waiting = self._hosts.store, list(range(self._hosts.job.num_hosts))
        found: list[tuple[int, _Answer]] = []
        until = time.monotonic() + self._within_s + SLACK_S
        while waiting:
            for host in list(waiting):
                if store.check([key := f"answer-{number}-{host}"]):
                    answer: _Answer = pickle.loads(store.get(key))
                    waiting.remove(host)
                    found.append((host, answer))
                    if answer.failure:
                        store.set(f"stop-{number}", "")
            if waiting and time.monotonic() > until:
                names = " and ".join(f"host {host}" for host in waiting)
                raise RankError(f"the agent of {names} did not answer within {self._within_s + SLACK_S:.0f} s", rank=0)
            time.sleep(POLL_S if waiting else 0.0)
        return found


def _local_ranks(cluster: ClusterSpec, num_ranks: int) -> list[range]:
    """The ranks of each host of a cluster, which are numbered host by host. The last hosts may have none."""
    found, start = list[range](), 0
    for group in cluster.groups:
        for _ in range(group.num_hosts):
            found.append(range(min(start, num_ranks), min(start + group.devices_per_host, num_ranks)))
            start += group.devices_per_host
    return found
