"""`Run`: the directory of a training run, written by rank 0 while the run goes on."""

import os
import platform
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from autopar._version import __version__
from autopar.errors import InputError, Problem, RuntimeInputError, short_repr
from autopar.files.atomic import write_text
from autopar.files.lock import FolderLock, take_lock
from autopar.runs.record import (
    CHECKPOINTS,
    END,
    METRICS_FILE,
    RUN_FILE,
    START,
    Event,
    Line,
    RunInfo,
    cut_partial_line,
    is_run,
    read_info,
    run_json,
    to_text,
)
from autopar.runtime.distributed.broadcast import gather_objects, run_on_first_rank
from autopar.runtime.distributed.mesh import named_ranks
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.model.preflight_check import FITS, LOGGING, UNFIT, UNSURE, disagreement

SYNCED_S = 10.0  # a line is on disk after this time at most


class Run:
    """The directory of a training run: what runs, and the metrics of every step. Use it in a `with` statement.

    `autopar status` shows a run while it goes on. A run that starts again in its directory continues the file. A step
    that is logged again replaces its earlier line and the lines of later steps; nothing is deleted. A second job in the
    directory is refused.

    Rank 0 writes. A line survives the death of its process at once, and a power failure after 10 seconds.

    Args:
        path: The directory. It is made if it is missing.
        parallel: The model that trains.
        total_steps: The steps of the whole run, for the time to its end.
        tensorboard: Whether the metrics are written for TensorBoard too, in the folder ``tensorboard``.

    Raises:
        InputError: The directory cannot be written, holds another model's run, or is in use. All ranks raise it.

    Example:
        >>> with autopar.Run("runs/first", parallel, total_steps=2) as run:
        ...     for step in range(2):
        ...         loss = parallel.forward_backward(batch)
        ...         run.log(step, loss, learning_rate=1e-3)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        parallel: ParallelModel,
        *,
        total_steps: int | None = None,
        tensorboard: bool = False,
    ) -> None:
        self.path = Path(path)
        self._parallel, self._wants_tensorboard = parallel, tensorboard
        self._step: int | None = None
        self._logged_s = self._synced_s = time.monotonic()
        self._counted = parallel.num_trained
        self._file = -1
        self._lock: FolderLock | None = None
        self._board: Any = None
        self._failure: str | None = None
        hosts = len(set(gather_objects(platform.node())))
        run_on_first_rank(lambda: self._open(total_steps, hosts))

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints. `autopar status` shows the newest one."""
        return self.path / CHECKPOINTS

    def log(
        self,
        step: int,
        loss: torch.Tensor | float,
        *,
        learning_rate: float | None = None,
        gradient_norm: torch.Tensor | float | None = None,
        skipped: bool = False,
        extra: Mapping[str, float] | None = None,
    ) -> None:
        """Write the metrics of a step. Collective.

        Samples, tokens and the time since the last call are counted here. The memory is the peak of the rank that held
        most: of the allocator on a GPU, of the process on a CPU. One all-gather of 8 × (7 + 2 × inputs) bytes a rank
        over gloo joins them.

        Args:
            step: The number of the step, larger than in the call before.
            loss: The loss of the step. A tensor on a GPU is waited for.
            learning_rate: The learning rate of the step.
            gradient_norm: The norm of the gradients, as `clip_grad_norm_` returns it.
            skipped: Whether the optimizer left the step out: `skipped` of an `autopar.GradScaler`.
            extra: Further numbers by name.

        Raises:
            RuntimeInputError: A value is of a wrong type, steps do not increase, or the ranks log different steps. All
                ranks raise it.
            InputError: An earlier line could not be written, for example because the disk is full. All ranks raise it.

        Example:
            >>> with autopar.Run("runs/second", parallel) as run:
            ...     run.log(0, parallel.forward_backward(batch), extra={"temperature": 0.5})
        """
        problems = list(self._problems(step, extra))
        numbers = {"loss": _number(loss), "gradient_norm": _number(gradient_norm), "learning_rate": learning_rate}
        for name, value in numbers.items():
            if not (_is_number(value) or (value is None and name != "loss")):
                problems.append(Problem(path=name, value=value, rule="must be a number"))
        peak, rank = self._joined(step if not problems else -1, problems)
        now = time.monotonic()
        samples, tokens = (n - before for n, before in zip(self._parallel.num_trained, self._counted, strict=True))
        seconds = None if self._step is None else max(1e-9, now - self._logged_s)
        line = Line(
            step=step,
            time_s=time.time(),
            loss=float(numbers["loss"] or 0.0),
            skipped=skipped,
            samples=samples,
            tokens=tokens,
            step_s=None if seconds is None or self._step is None else seconds / (step - self._step),
            samples_per_s=samples / seconds if seconds and samples else None,
            tokens_per_s=tokens / seconds if seconds and tokens else None,
            peak_bytes=peak,
            peak_rank=rank,
            learning_rate=_optional(learning_rate),
            gradient_norm=_optional(numbers["gradient_norm"]),
            extra={name: float(value) for name, value in (extra or {}).items()},
        )
        self._step, self._logged_s, self._counted = step, now, self._parallel.num_trained
        if self._lock is not None:
            self._write(to_text(line))
            self._show_on_board(line)

    def close(self, outcome: str = "done") -> None:
        """End the run: write the end, and let other jobs use the directory. The end of a `with` statement does so.

        Args:
            outcome: ``done``, or the reason in one word.

        Raises:
            InputError: A line could not be written. Rank 0 raises it.

        Example:
            >>> run = autopar.Run("runs/third", parallel)
            >>> run.close()
        """
        if self._lock is None:
            return
        self._write(to_text(Event(event=END, time_s=time.time(), outcome=outcome)), sync=True)
        with suppress(OSError):
            os.close(self._file)
        if self._board is not None:
            self._board.close()
        self._lock.release()
        self._lock = None
        if self._failure is not None:
            raise InputError(self._failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close("done" if kind is None else kind.__name__)
        except InputError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # the first cause is shown

    # Rank 0.

    def _open(self, total_steps: int | None, hosts: int) -> None:
        if total_steps is not None and (not isinstance(total_steps, int) or total_steps < 1):
            raise InputError(f"total_steps must be a whole number above 0; got {short_repr(total_steps)}")
        if self._wants_tensorboard:
            _summary_writer()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.path} cannot be made: {error.strerror or error}; name another directory") from None
        self._lock = take_lock(self.path)
        try:
            info = self._info(total_steps, hosts)
            write_text(self.path / RUN_FILE, run_json(info))
            metrics = self.path / METRICS_FILE
            self._file = os.open(metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            cut_partial_line(metrics)
        except (InputError, OSError) as error:
            self._lock.release()
            self._lock = None
            raise InputError(str(error)) from None
        self._write(to_text(Event(event=START, time_s=time.time())), sync=True)

    def _info(self, total_steps: int | None, hosts: int) -> RunInfo:
        plan, now = self._parallel.plan, datetime.now(UTC).isoformat(timespec="seconds")
        before = read_info(self.path) if is_run(self.path) else None
        if before is not None and before.model != plan.model:
            raise InputError(
                f"{self.path} holds a run of the model {short_repr(before.model)}, this one is "
                f"{short_repr(plan.model)}; name another directory"
            )
        device = self._parallel.device
        return RunInfo(
            model=plan.model,
            started_at=now if before is None else before.started_at,
            restarted_at=now,
            device_type=device.type,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            num_ranks=plan.degrees.world_size,
            num_hosts=hosts,
            versions={"autopar": __version__, "torch": torch.__version__, "python": platform.python_version()},
            total_steps=total_steps,
            predicted=plan.predicted,
            plan=plan.to_dict(),
        )

    def _write(self, text: str, *, sync: bool = False) -> None:
        """Append a line. The next call of `log` raises a failure on all ranks."""
        content = text.encode()
        try:
            if os.write(self._file, content) != len(content):
                raise OSError("the disk is full")
            if sync or time.monotonic() - self._synced_s > SYNCED_S:
                os.fsync(self._file)
                self._synced_s = time.monotonic()
        except OSError as error:
            why = error.strerror or str(error)
            self._failure = f"{self.path / METRICS_FILE} cannot be written: {why}; the metrics of a step are lost"

    def _show_on_board(self, line: Line) -> None:
        if not self._wants_tensorboard:
            return
        if self._board is None:  # later steps of an earlier start are hidden
            self._board = _summary_writer()(str(self.path / "tensorboard"), purge_step=line.step)
        shown = {"loss": line.loss, "learning_rate": line.learning_rate, "gradient_norm": line.gradient_norm}
        shown |= {"step_s": line.step_s, "tokens_per_s": line.tokens_per_s, "samples_per_s": line.samples_per_s}
        shown |= {"peak_bytes": float(line.peak_bytes), **line.extra}
        for name, value in shown.items():
            if value is not None:
                self._board.add_scalar(name, value, line.step)

    # All ranks.

    def _problems(self, step: Any, extra: Any) -> list[Problem]:
        found = []
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            found.append(Problem(path="step", value=step, rule="must be a whole number of at least 0"))
        elif self._step is not None and step <= self._step:
            found.append(Problem(path="step", value=step, rule=f"must be above {self._step}, which was logged before"))
        for name, value in (extra or {}).items():
            if not isinstance(name, str) or not _is_number(value):
                found.append(Problem(path=f"extra[{name!r}]", value=value, rule="must be a number"))
        return found

    def _joined(self, step: int, problems: list[Problem]) -> tuple[int, int]:
        """The largest peak of memory and its rank. Raises on all ranks what any rank has to say."""
        known = UNFIT if problems else UNSURE if self._failure else FITS
        rows = self._parallel.exchange([2 * LOGGING, step, known, peak_bytes(self._parallel.device)])
        if any(row[0] != 2 * LOGGING for row in rows):
            raise RuntimeInputError(disagreement(rows, (), lambda rank: rank))
        if problems:
            raise RuntimeInputError("the metrics cannot be logged", problems)
        bad = [rank for rank, row in enumerate(rows) if row[2] == UNFIT]
        if bad:
            raise RuntimeInputError(f"the metrics of {named_ranks(bad)} cannot be logged; the error there says why")
        if len({row[1] for row in rows}) > 1:
            steps = ", ".join(f"rank {rank} step {row[1]}" for rank, row in enumerate(rows[:16]))
            raise RuntimeInputError(f"ranks log different steps: {steps}; log the same step on every rank")
        if rows[0][2] == UNSURE:
            raise InputError(self._failure or f"rank 0 cannot write {self.path / METRICS_FILE}; its error says why")
        largest = max(row[3] for row in rows)
        return largest, next(rank for rank, row in enumerate(rows) if row[3] == largest)


def peak_bytes(device: torch.device) -> int:
    """The most memory so far: of torch's allocator on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("tensorboard=True needs TensorBoard; run: pip install 'tensorboard>=2.21,<3'") from error
    return SummaryWriter


def _number(value: Any) -> Any:
    """A tensor's number, of a split one too."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return getattr(value, "full_tensor", lambda: value)().item()
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)
