"""Functions of ranks in tests of damaged and broken checkpoints: `Ranks.run("checkpoint_fault_ranks:name", ...)`."""

import errno
import hashlib
import itertools
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from checkpoint_ranks import error_of
from data_models import rows
from data_ranks import LENGTH, made

from autopar.runtime.checkpoint.loading import verified
from autopar.runtime.model import checkpointed
from autopar.runtime.model.module import ParallelModel

WISH = {"dp": 2, "zero": 3}
Faults = Mapping[str, Callable[[Path], None]]


def digest(parallel: ParallelModel) -> str:
    """A hash of this rank's parameters."""
    found = hashlib.sha256()
    for _, parameter in parallel.stored_parameters():
        local: torch.Tensor = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        found.update(local.contiguous().numpy().tobytes())
    return found.hexdigest()


def model_and_optimizer(wish: Mapping[str, Any] = WISH, **options: Any) -> tuple[ParallelModel, torch.optim.Optimizer]:
    size = dist.get_world_size()
    parallel, _ = made(size, wish if size > 1 else {"dp": 1}, 8 // wish.get("dp", 1) if size > 1 else 8, **options)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2)


def one_step(parallel: ParallelModel, optimizer: torch.optim.Optimizer, seed: int) -> float:
    loss = float(parallel.forward_backward(parallel.local_batch(rows(8, LENGTH, seed))))
    optimizer.step()
    optimizer.zero_grad()
    return loss


def two_saves(rank: int, folder: str, who: int, at: float | None, asynchronous: bool) -> Any:
    """Save steps 1 and 2. Rank `who` is killed at the part `at` of what the second save does with files."""
    parallel, optimizer = model_and_optimizer()
    one_step(parallel, optimizer, 0)
    with counted_calls() as calls:
        parallel.save(folder, optimizer, step=1)
    digests = [digest(parallel)]
    one_step(parallel, optimizer, 1)
    digests.append(digest(parallel))
    Path(folder, f"digests-{rank}").write_text("\n".join(digests))
    dist.barrier()
    fatal = int(at * next(calls)) if at is not None and rank == who else None
    with counted_calls(fatal):
        parallel.save(folder, optimizer, step=2, asynchronous=asynchronous)
        parallel.finish_saving()


@contextmanager
def counted_calls(fatal: int | None = None) -> Iterator[Iterator[int]]:
    """Count what is done with files. The process is killed before the call number `fatal`."""
    count = itertools.count()
    writes = os.write

    def before(name: str) -> Any:
        function = getattr(os, name)

        def called(*arguments: Any, **options: Any) -> Any:
            if next(count) == fatal:
                if name == "write":  # a part of it is written
                    writes(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return mock.patch.object(os, name, called)

    names = ("write", "fsync", "rename", "replace", "mkdir", "open")
    patches = [before(name) for name in names]
    for patch in patches:
        patch.start()
    try:
        yield count
    finally:
        for patch in patches:
            patch.stop()


def after_a_kill(rank: int, folder: str) -> Any:
    """What a new job finds: the latest step, whether its weights are those of this step, and the next save."""
    parallel, optimizer = model_and_optimizer()
    step = parallel.latest_step(folder)
    parallel.load(folder, optimizer)
    expected = Path(folder, f"digests-{rank}").read_text().splitlines()
    is_equal = step is not None and digest(parallel) == expected[step - 1]
    parallel.save(folder, optimizer, step=3)
    return step, is_equal, parallel.latest_step(folder)


def full_disk(rank: int, folder: str) -> dict[str, Any]:
    """Errors where one rank cannot write: a limit of file sizes, no space at some byte, in a thread, read-only."""
    parallel, optimizer = model_and_optimizer()
    one_step(parallel, optimizer, 0)
    parallel.save(folder, optimizer, step=1)
    saved = digest(parallel)
    one_step(parallel, optimizer, 1)
    errors = {}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    errors["limit"] = error_of(lambda: parallel.save(folder, optimizer, step=2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with no_space(9000 if rank == 1 else None):
        errors["no space"] = error_of(lambda: parallel.save(folder, optimizer, step=2))
    with no_space(20 if rank == 0 else None, only="manifest"):
        errors["manifest"] = error_of(lambda: parallel.save(folder, optimizer, step=2))
    dist.barrier()
    left = sorted(path.name for path in Path(folder).iterdir())
    with no_space(5000 if rank == 1 else None):
        parallel.save(folder, optimizer, step=2, asynchronous=True)
        wait_for_thread(parallel)
    errors["in a thread"] = error_of(lambda: one_step(parallel, optimizer, 2))
    errors["raised once"] = error_of(lambda: one_step(parallel, optimizer, 2))
    errors["finish"] = error_of(parallel.finish_saving)
    with read_only(Path(folder), rank):
        errors["read-only"] = error_of(lambda: parallel.save(folder, optimizer, step=2))
    latest = parallel.latest_step(folder)
    parallel.load(folder, optimizer)
    return {"errors": errors, "left": left, "latest": latest, "equal": digest(parallel) == saved}


def wait_for_thread(parallel: ParallelModel) -> None:
    pending = parallel._saver._pending
    assert pending is not None
    pending.result()


@contextmanager
def no_space(after: int | None, *, only: str = "") -> Iterator[None]:
    """Writing fails with ENOSPC after some bytes. `only` the manifest fails: it is not written by `os.write`."""
    if after is None:
        yield
        return
    left = after
    write = os.write

    def failing(descriptor: int, content: Any) -> int:
        nonlocal left
        if len(content) > left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= len(content)
        return write(descriptor, content)

    def no_sync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if only:
        from autopar.runtime.checkpoint import saving

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "manifest.json")

        with mock.patch.object(saving, "write_manifest", full):
            yield
        return
    with mock.patch.object(os, "write", failing):
        yield


@contextmanager
def read_only(folder: Path, rank: int) -> Iterator[None]:
    """The folder cannot be written. The first user may write everywhere, so the rank is another user meanwhile."""
    is_root = os.geteuid() == 0
    dist.barrier()
    if rank == 0:
        folder.chmod(0o555)
    dist.barrier()
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        dist.barrier()
        folder.chmod(0o755)


def not_finite(rank: int, folder: str) -> dict[str, Any]:
    """A parameter that is NaN on one rank is not saved."""
    parallel, optimizer = model_and_optimizer()
    one_step(parallel, optimizer, 0)
    parallel.save(folder, optimizer, step=1)
    with torch.no_grad():
        if rank == 1:
            weight: Any = dict(parallel.stored_parameters())["head.weight"]
            weight.to_local()[0, 0] = float("nan")
    text = error_of(lambda: parallel.save(folder, optimizer, step=2))
    return {"text": text, "latest": parallel.latest_step(folder)}


def unequal(rank: int, folder: str) -> dict[str, str]:
    """Errors where ranks do not save the same."""
    parallel, _ = model_and_optimizer()
    other = torch.optim.AdamW(parallel.parameters(), lr=1e-2 * (1 + rank))
    foreign = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    return {
        "extra": error_of(lambda: parallel.save(folder, None, {"seconds": rank}, step=1)),
        "tensor": error_of(lambda: parallel.save(folder, None, {"mask": torch.full((3,), rank)}, step=1)),
        "step": error_of(lambda: parallel.save(folder, None, step=rank)),
        "options": error_of(lambda: parallel.save(folder, other, step=1)),
        "optimizer": error_of(lambda: parallel.save(folder, foreign, step=1)),
        "function": error_of(lambda: parallel.save(folder, None, {"schedule": {"f": print}}, step=1)),
        "keep_last": error_of(lambda: parallel.save(folder, None, step=1, keep_last=0)),
        "negative": error_of(lambda: parallel.save(folder, None, step=-1)),
        "folder": str(sorted(os.listdir(folder))),
    }


def loads_of_damaged(rank: int, folders: Mapping[str, str], step: int | None) -> dict[str, tuple[str, bool]]:
    """The error of loading each folder, and whether the model is as it was."""
    parallel, optimizer = model_and_optimizer()
    one_step(parallel, optimizer, 5)
    before = digest(parallel)
    found = {}
    for name, folder in folders.items():
        text = error_of(lambda folder=folder: parallel.load(folder, optimizer, step=step))  # type: ignore[misc]
        found[name] = (text, digest(parallel) == before)
    return found


def saved_twice(rank: int, folder: str) -> None:
    """Steps 1 and 2 with other weights."""
    parallel, optimizer = model_and_optimizer()
    for step in (1, 2):
        one_step(parallel, optimizer, step)
        parallel.save(folder, optimizer, {"table": torch.arange(5), "epoch": step}, step=step)


def loads_of_others(rank: int, folder: str) -> dict[str, tuple[str, bool]]:
    """The error of loading into other models and optimizers, and whether the model is as it was."""
    found = {}

    def tried(name: str, parallel: ParallelModel, optimizer: Any, extra: Any = None) -> None:
        before = digest(parallel)
        text = error_of(lambda: parallel.load(folder, optimizer, extra))
        found[name] = (text, digest(parallel) == before)

    parallel, adam = model_and_optimizer()
    named = list(parallel.named_parameters())
    tried("class", parallel, torch.optim.SGD(parallel.parameters(), lr=0.1))
    tried("none", parallel, None)
    tried("two", parallel, [adam, torch.optim.SGD(parallel.parameters(), lr=0.1)])
    tried("groups", parallel, torch.optim.AdamW([{"params": [p]} for _, p in named]))
    tried("fewer", parallel, torch.optim.AdamW([p for n, p in named if n != "head.weight"]))
    tried("extra", parallel, adam, {"schedule": torch.optim.lr_scheduler.ConstantLR(adam)})
    tried("no object", parallel, adam, {"epoch": 3})
    tied, optimizer = model_and_optimizer(tied=True)
    tried("tied", tied, optimizer)
    return found


def kept(rank: int, folder: str) -> dict[str, Any]:
    """Which steps remain, and whether a step that is saved again, and an older one on request, are what they were."""
    parallel, optimizer = model_and_optimizer()
    digests, found = {}, {}
    for step in range(1, 6):
        one_step(parallel, optimizer, step)
        parallel.save(folder, optimizer, step=step, keep_last=3, asynchronous=step % 2 == 0)
        digests[step] = digest(parallel)
    parallel.finish_saving()
    dist.barrier()
    found["kept"] = sorted(os.listdir(folder))
    one_step(parallel, optimizer, 9)
    parallel.save(folder, optimizer, step=5, keep_last=3)
    dist.barrier()
    found["again"] = sorted(os.listdir(folder))
    digests[5] = digest(parallel)
    found["older"] = error_of(lambda: parallel.load(folder, optimizer, step=3)), digest(parallel) == digests[3]
    one_step(parallel, optimizer, 10)
    parallel.save(folder, optimizer, step=4, keep_last=2)
    digests[4] = digest(parallel)
    dist.barrier()
    found["went back"] = sorted(os.listdir(folder)), parallel.latest_step(folder)
    parallel.load(folder, optimizer)
    found["latest"] = digest(parallel) == digests[4]
    parallel.load(folder, optimizer, step=5)
    found["newest"] = digest(parallel) == digests[5]
    found["weights"] = error_of(lambda: parallel.load(folder, weights_only=True)), digest(parallel) == digests[4]
    return found


def locked(rank: int, folder: str, step: int) -> str:
    parallel, optimizer = model_and_optimizer()
    parallel.save(folder, optimizer, step=step)
    return str(os.getpid())


def refused(rank: int, folder: str) -> str:
    parallel, optimizer = model_and_optimizer()
    return error_of(lambda: parallel.save(folder, optimizer, step=9))


class Payload:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.mark,))


def plant_pickles(step: Path, mark: Path) -> None:
    """Pickles under every name that torch's own storage reads, and as the file of a rank."""
    content = pickle.dumps(Payload(str(mark)))
    for name in (".metadata", "__0_0.distcp", "rank-00000-000.safetensors"):
        (step / name).write_bytes(content)


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def file_lost_while_loading(rank: int, folder: str, name: str) -> tuple[str, str]:
    """The error of a load whose file goes after its hash was compared; and of a load when it is back."""
    parallel, optimizer = model_and_optimizer()
    path = max(Path(folder).glob(f"step-*/{name}"))

    def then_gone(*arguments: Any) -> Any:
        found = verified(*arguments)
        dist.barrier()
        if rank == 0:
            path.rename(path.with_suffix(".gone"))
        dist.barrier()
        return found

    with mock.patch.object(checkpointed, "verified", then_gone):
        first = error_of(lambda: parallel.load(folder, optimizer))
    dist.barrier()
    if rank == 0:
        path.with_suffix(".gone").rename(path)
    dist.barrier()
    return first, error_of(lambda: parallel.load(folder, optimizer))
