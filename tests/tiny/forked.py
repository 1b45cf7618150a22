"""A script's ranks as forks of one process with torch loaded: what torchrun starts, without imports in every rank.

Ranks get the environment of torchrun, and meet at a store that the parent holds, as torchrun's agent does. A rank that
torchrun starts spends 5 s of a core on imports: some tests of examples and of `tests/integration` go through it, for
what torchrun itself does, the others come here.
"""

import faulthandler
import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from kept_captures import FOLDER, keep

from autopar.runtime.distributed.launch import PRELOADED

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
QUIET = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "TORCH_LOGS": "-dtensor"}
POLL_S = 0.05
GRACE_S = 5.0


def run(script: Path, arguments: Sequence[str], folder: Path, num_ranks: int | None = None) -> str:
    """What the ranks of a script print in a folder; a failing rank ends all and is shown.

    Without `num_ranks` the script is first started alone, and its own call of torchrun is read and not done.
    """
    if num_ranks is None:
        num_ranks, arguments = asked_for(script, arguments, folder)
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return _succeeded(
        script, arguments, [common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(num_ranks)], folder
    )


def under_torchrun(script: Path, arguments: Sequence[str], folder: Path) -> str:
    """What a script prints that starts torchrun itself, as a user starts it."""
    command, environment = [sys.executable, str(script), *arguments], os.environ | {"TORCH_LOGS": "-dtensor"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def alone(script: Path, arguments: Sequence[str], folder: Path) -> str:
    """What a script prints that is run by itself, without torchrun's environment."""
    return _succeeded(script, arguments, [{}], folder)


def _succeeded(script: Path, arguments: Sequence[str], ranks: Sequence[Mapping[str, str]], folder: Path) -> str:
    status, shown = _forked([(script, tuple(arguments), rank) for rank in ranks], folder)
    assert not any(status), f"exit statuses {status} of {script.name}:\n{_failures(status, shown)}"
    return "".join(shown)


def _failures(status: Sequence[int | None], shown: Sequence[str]) -> str:
    """The end of every failed rank's output. Ranks that aborted come first, killed ranks last."""
    failed = sorted((code == -signal.SIGKILL, code, rank) for rank, code in enumerate(status) if code)
    return "\n".join(f"--- rank {rank}, exit status {code}:\n{shown[rank][-3000:]}" for _, code, rank in failed)


def asked_for(script: Path, arguments: Sequence[str], folder: Path) -> tuple[int, tuple[str, ...]]:
    """How many ranks a script starts under torchrun when it is started alone, and with which arguments."""
    status, (shown,) = _forked([(script, tuple(arguments), None)], folder)
    lines = shown.splitlines()
    assert status == [0] and lines, shown
    command = lines[-1].split("\0")
    count, logs, _, path, *rest = command[len(TORCHRUN) :]
    assert command[: len(TORCHRUN)] == TORCHRUN and logs == "--log-dir" and Path(path) == script, command
    assert f"starting {count} ranks" in lines
    return int(count), tuple(rest)


def _forked(
    jobs: Sequence[tuple[Path, tuple[str, ...], Mapping[str, str] | None]], folder: Path
) -> tuple[list[int | None], list[str]]:
    """Exit statuses and outputs of processes that run together; the first that fails ends the others."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    outputs = [folder / f"output of rank {rank}" for rank in range(len(jobs))]
    arguments = [(*job, folder, output) for job, output in zip(jobs, outputs, strict=True)]
    processes: list[Any] = [context.Process(target=_script, args=own, daemon=True) for own in arguments]
    for process in processes:
        process.start()
    try:
        while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.join(0 if process.exitcode is None and any(p.exitcode for p in processes) else GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
    shown = [output.read_text() if output.exists() else "" for output in outputs]
    for output in outputs:
        output.unlink(missing_ok=True)
    return [process.exitcode for process in processes], shown


def _script(script: Path, arguments: tuple[str, ...], rank: Mapping[str, str] | None, folder: Path, out: Path) -> None:
    """A process: run a script as its main module, as Python does; without `rank`, torchrun is not started."""
    where = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(where, stream)
    faulthandler.enable()  # a rank that aborts shows where
    os.chdir(folder)
    if rank is not None:
        os.environ.update(QUIET | dict(rank))
        keep(int(rank.get("RANK", 0)), os.environ[FOLDER])
    sys.argv, sys.path[0:0] = [str(script), *arguments], [str(script.parent)]
    status = 1
    try:
        with mock.patch.object(subprocess, "run", _show if rank is None else subprocess.run):
            runpy.run_path(str(script), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.exit(status)


def _show(command: Sequence[str], env: Mapping[str, str], **_: object) -> subprocess.CompletedProcess[str]:
    """In place of starting torchrun: print its command line."""
    assert env.keys() >= QUIET.keys()
    print("\0".join(command), flush=True)
    return subprocess.CompletedProcess(command, 0)
