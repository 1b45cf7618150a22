"""Local ranks: processes that a server with torch loaded starts once, and that run functions together.

The first rank that raises ends all ranks, and its error is shown. If ranks wait for a rank that does not answer, the
error names this rank and its position. No port is used: ranks meet through a file in a private folder.
"""

import faulthandler
import gc
import importlib
import logging
import multiprocessing as mp
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError, RankError

if TYPE_CHECKING:
    import torch

DEFAULT_TIMEOUT_S = 300.0
GRACE_S = 5.0
GATHER_S = 1.0  # wait for the failures of other ranks, to find the first
DIED = 0.0  # the failure time of a process that has ended
STACK_S = 2.0  # for a rank that does not answer to write its stack
STACK_LINES = 8
TIMED_OUT = ("timed out", "timeout", "Timed out", "failed to pass monitoredBarrier")
LOGS_OF_LIBRARIES = ("torch", "torchao", "transformers")  # of a rank, below errors they say nothing of its work
Describe = Callable[[int], str]
Failure = tuple[float, str, str, str, str]  # when, "user" or "bug", message, notes, traceback
# The server that ranks are forked from loads these modules once, if they are installed.
PRELOADED = (
    "autopar.runtime.distributed.quiet",
    "torch",
    "torch._dynamo",
    "torch.export._trace",
    "torch.distributed.fsdp",
    "autopar.runtime.model.module",
    "autopar.commands.verify",
    "autopar.commands.trial",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)


def device_of_rank() -> "torch.device":
    """The device of this rank: its GPU if ranks talk by NCCL, else the CPU."""
    import torch
    import torch.distributed as dist

    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _work(
    rank: int,
    world_size: int,
    pipe: Any,
    channel: Any,
    *,
    folder: str,
    timeout_s: float,
    checked: bool,
    device_type: str,
) -> None:
    """A rank: join the group, then run functions until told to stop. `folder` is private to the ranks of a world."""
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from autopar._torch.private import share_gloo_device

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    mp.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined] # of sockets that send tensors
    # torch reads TORCH_DISTRIBUTED_DEBUG at its import, which the server of ranks has done
    levels = dist.DebugLevel  # type: ignore[attr-defined]
    dist.set_debug_level(levels.DETAIL if checked else levels.OFF)  # type: ignore[attr-defined]
    logging.disable(logging.NOTSET)  # the server's imports were silent
    for library in LOGS_OF_LIBRARIES:
        logging.getLogger(library).setLevel(logging.ERROR)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # else torch keeps a Python stack of every collective, which nobody reads
    torch.set_num_threads(1)
    gc.freeze()  # else each collection walks all that the server has loaded
    stack = os.open(stack_file(folder, rank), os.O_CREAT | os.O_WRONLY)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    faulthandler.enable(file=stack)  # a fatal signal leaves the stacks of all threads
    threading.Thread(target=_answer, args=(channel, threading.get_ident()), daemon=True).start()
    try:
        if device_type == "cuda":
            torch.cuda.set_device(rank)
        else:
            share_gloo_device()
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=FileStore(os.path.join(folder, "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        pipe.send(("ready", None))
        while (job := pipe.recv()) is not None:
            target, arguments = job
            module, name = target.split(":")
            function = getattr(importlib.import_module(module), name)
            pipe.send(("done", function(rank, *arguments)))
    except (EOFError, BrokenPipeError):  # the parent was killed and could not remove its folder
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException as error:
        kind = "user" if isinstance(error, AutoparError) else "bug"
        text, notes = f"{type(error).__name__}: {error}", "; ".join(getattr(error, "__notes__", ()))
        with suppress(BrokenPipeError):
            pipe.send(("failed", (time.time(), kind, text, notes, traceback.format_exc())))
        os._exit(1)  # no collective teardown: the others are ended by the parent
    os._exit(0)


def _answer(channel: Any, thread: int) -> None:
    """Say where a rank's thread is whenever the parent asks, also while it waits in a collective."""
    while True:
        try:
            channel.recv()
        except (EOFError, OSError):
            return
        from autopar.runtime.distributed.hang_report import (  # a step has imported it already
            frames_of_thread,
            rank_position,
        )

        channel.send(rank_position(frames_of_thread(thread)))


def _signal(code: int | None) -> str:
    """The signal that an exit code stands for, in words."""
    return f" ({signal.Signals(-code).name})" if code is not None and -code in set(signal.Signals) else ""


def stack_file(folder: str, rank: int) -> str:
    """Where a rank writes its Python stack when it is asked to."""
    return os.path.join(folder, f"stack-{rank}")


class Ranks:
    """A world of ranks on this machine, over gloo or NCCL. A `checked` one compares collectives before they run."""

    def __init__(
        self,
        world_size: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,  # of a rank that waits for another; a run ends after twice the time
        checked: bool = True,  # order and shapes of collectives are compared before they run, which takes time
        device_type: str = "cpu",  # ranks on "cpu" talk by gloo, on "cuda" by NCCL
    ) -> None:
        self.world_size, self.timeout_s, self.device_type = world_size, timeout_s, device_type
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-ranks-")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        options = {"folder": self._folder.name, "timeout_s": timeout_s, "checked": checked, "device_type": device_type}
        self._pipes, self._questions, self._processes = list[Any](), list[Any](), list[Any]()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            question, channel = context.Pipe()
            ends = rank, world_size, theirs, channel
            process = context.Process(target=_work, args=ends, kwargs=options, daemon=True, name=f"rank-{rank}")
            process.start()
            theirs.close()
            channel.close()
            self._pipes.append(ours)
            self._questions.append(question)
            self._processes.append(process)
        self._collect("ready")

    def run(self, target: str, *arguments: Any, describe: Describe = lambda rank: f"rank {rank}") -> list[Any]:
        """Run ``module:function(rank, *arguments)`` on every rank. A failed run raises `RankError`; the world ends."""
        try:
            for pipe in self._pipes:
                with suppress(BrokenPipeError):  # a rank that ended between two runs: `_collect` says so
                    pipe.send((target, arguments))
            return self._collect("done", describe)
        except BaseException:
            self.close()
            raise

    def _collect(self, wanted: str, describe: Describe = lambda rank: f"rank {rank}") -> list[Any]:
        results: dict[int, Any] = {}
        self._asked = time.monotonic()
        deadline = self._asked + 2 * self.timeout_s  # ranks that wait for another say so after half of it
        while len(results) < self.world_size:
            waiting: dict[Any, int] = {self._pipes[r]: r for r in range(self.world_size) if r not in results}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail_silent(sorted(waiting.values()), describe)
            for pipe in ready:
                rank = waiting[pipe]
                kind, value = self._receive(rank)
                if kind == "failed":
                    self._fail(rank, value, waiting.values(), describe)
                assert kind == wanted, (kind, wanted)
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = self._pipes[rank].recv()
            return str(kind), value
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE_S)
            code, path = self._processes[rank].exitcode, stack_file(self._folder.name, rank)
            stacks = Path(path).read_text() if os.path.exists(path) else ""
            waited = time.monotonic() - self._asked
            if self.device_type == "cuda" and code == -signal.SIGABRT and waited >= self.timeout_s:
                text = f"a collective of NCCL timed out: it did not end within {self.timeout_s:.0f} s"
                return "failed", (time.time(), "bug", text, "", stacks)
            return "failed", (DIED, "bug", f"the process ended with exit code {code}{_signal(code)}", "", stacks)

    def _failures(self, rank: int, value: Failure, waiting: Collection[int]) -> dict[int, Failure]:
        """A failing rank breaks the connections of others: all failures that arrive together."""
        failures = {rank: value}
        others: dict[Any, int] = {self._pipes[r]: r for r in waiting if r != rank}
        deadline = time.monotonic() + GATHER_S
        while others and value[0] != DIED:
            ready = multiprocessing.connection.wait(list(others), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                other = others.pop(pipe)
                kind, value = self._receive(other)
                if kind == "failed":
                    failures[other] = value
        return failures

    def _fail(self, rank: int, value: Failure, waiting: Collection[int], describe: Describe) -> None:
        """End all ranks and show the first cause: a process that died, one that does not answer, the first error."""
        failures = self._failures(rank, value, waiting)
        first = min(failures, key=lambda r: failures[r][0])
        when, kind, message, notes, trace = failures[first]
        silent = sorted(set(waiting) - set(failures))
        if silent and when != DIED and any(word in message for word in TIMED_OUT):
            told = [failures[rank][3] for rank in sorted(failures) if failures[rank][3]]
            why = f"; {describe(first)} waited for it: {message.splitlines()[0]}"
            self._fail_silent(silent, describe, "\n".join([why, *told]))
        self.close()
        text = f"{describe(first)} failed: {'; '.join(part for part in (message, notes) if part)}"
        raise RankError(text if kind == "user" or not trace else f"{text}\n\n{trace}", rank=first)

    def _fail_silent(self, ranks: Sequence[int], describe: Describe, why: str = "") -> None:
        """End all ranks; some do not answer, and are asked where they are."""
        stacks = {rank: f"{self._rank_position(rank)}\n{self._stack(rank)}".strip("\n") for rank in ranks}
        for rank in ranks:
            self._processes[rank].kill()  # what does not answer does not end by itself
        self.close()
        named = " and ".join(describe(rank) for rank in ranks)
        shown = "".join(f"\n\n{describe(rank)} is at\n{stack}" for rank, stack in stacks.items() if stack)
        within = self.timeout_s if why else 2 * self.timeout_s
        raise RankError(f"{named} did not answer within {within:.0f} s{why}{shown}", rank=ranks[0])

    def _rank_position(self, rank: int) -> str:
        """Stage, micro-batch and collective of a rank; empty outside a step, and where it cannot run at all."""
        try:
            self._questions[rank].send(None)
            return str(self._questions[rank].recv()) if self._questions[rank].poll(STACK_S) else ""
        except (EOFError, OSError):  # it has just ended
            return ""

    def _stack(self, rank: int) -> str:
        """The innermost lines of a rank's Python stack; empty where it cannot run at all."""
        process, path = self._processes[rank], stack_file(self._folder.name, rank)
        deadline = time.monotonic() + STACK_S
        if process.is_alive() and os.path.exists(path):
            os.kill(process.pid, signal.SIGUSR1)
            while not os.path.getsize(path) and time.monotonic() < deadline:
                time.sleep(0.05)
        text = Path(path).read_text() if os.path.exists(path) else ""
        return "\n".join(text.splitlines()[: 1 + STACK_LINES])

    @property
    def is_open(self) -> bool:
        """Whether ranks are there to run something: not after `close`, nor after one of them failed."""
        return bool(self._processes)

    def close(self) -> None:
        """End every rank; nothing is left running."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                process.terminate()
            pipe.close()
        for question in self._questions:
            question.close()
        for process in self._processes:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._questions, self._processes = [], [], []
        self._folder.cleanup()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
