"""Local ranks: processes started once from a server that has torch loaded, fed with functions to run together.

The first rank that raises ends all of them, and its error is the one that is shown. No port is fixed: ranks meet
through a file in a private folder.
"""

import importlib
import multiprocessing as mp
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any

from autopar.errors import AutoparError, RankError

DEFAULT_TIMEOUT_S = 300.0
GRACE_S = 5.0
GATHER_S = 1.0  # how long the failures of other ranks are waited for, to tell which came first
DIED = 0.0  # in place of the time of a failure: the process is gone
Failure = tuple[float, str, str, str]  # when, "user" or "bug", message, traceback
# loaded once by the server that ranks are forked from; a module that is not installed is passed over
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.export._trace",
    "torch.distributed.fsdp",
    "autopar.runtime.module",
    "autopar.verification",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)


def _work(rank: int, world_size: int, store: str, timeout_s: float, checked: bool, pipe: Any) -> None:
    """A rank: join the group, then run functions until told to stop."""
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    level = "DETAIL" if checked else "OFF"
    os.environ.update(TORCH_DISTRIBUTED_DEBUG=level, RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(store, world_size),
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
    except EOFError:
        pass
    except BaseException as error:
        kind = "user" if isinstance(error, AutoparError) else "bug"
        pipe.send(("failed", (time.time(), kind, f"{type(error).__name__}: {error}", traceback.format_exc())))
        os._exit(1)  # no collective teardown: the others are ended by the parent
    os._exit(0)


class Ranks:
    """A world of gloo ranks on this machine. Use as a context manager; `run` may be called many times.

    A `checked` world compares every collective's order and shapes before it runs: slower, but a mismatch is an error
    at once and not a wait for the timeout. Measure speed without.
    """

    def __init__(self, world_size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S, checked: bool = True) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-ranks-")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        store = os.path.join(self._folder.name, "store")
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            own = (rank, world_size, store, timeout_s, checked, theirs)
            process = context.Process(target=_work, args=own, daemon=True, name=f"rank-{rank}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect("ready")

    def run(self, target: str, *arguments: Any) -> list[Any]:
        """Run ``module:function(rank, *arguments)`` on every rank; results in rank order.

        Raises `RankError` with the first rank's error and traceback; the world is then gone.
        """
        for pipe in self._pipes:
            pipe.send((target, arguments))
        return self._collect("done")

    def _collect(self, wanted: str) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(results) < self.world_size:
            waiting: dict[Any, int] = {self._pipes[r]: r for r in range(self.world_size) if r not in results}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RankError(f"ranks {sorted(waiting.values())} did not answer within {self.timeout_s:.0f} s")
            for pipe in ready:
                rank = waiting[pipe]
                kind, value = self._receive(rank)
                if kind == "failed":
                    self._fail(self._first_cause(rank, value, waiting.values()))
                assert kind == wanted, (kind, wanted)
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = self._pipes[rank].recv()
            return str(kind), value
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE_S)
            code = self._processes[rank].exitcode
            return "failed", (DIED, "bug", f"the process ended with exit code {code}", "")

    def _first_cause(self, rank: int, value: Failure, waiting: Iterable[int]) -> tuple[int, Failure]:
        """A failing rank breaks the connections of others: of all failures that arrive together, the first.

        A process that died counts as first: whoever raised an exception may have done so because of that.
        """
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
        first = min(failures, key=lambda r: failures[r][0])
        return first, failures[first]

    def _fail(self, cause: tuple[int, Failure]) -> None:
        rank, (_, kind, message, trace) = cause
        self.close()
        text = f"rank {rank} failed: {message}"
        raise RankError(text if kind == "user" or not trace else f"{text}\n\n{trace}", rank=rank)

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
        for process in self._processes:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
