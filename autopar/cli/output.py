"""Printing: tables and explanations through rich on stdout, progress on stderr, JSON exactly as it is.

Within `own_stdout` nobody else writes to stdout: what a model or a library prints goes to stderr.
"""

import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO

from rich.cells import cell_len
from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.table import Table
from rich.text import Text

from autopar.errors import AutoparError
from autopar.ir.explanation import Section

if TYPE_CHECKING:
    from autopar.cost_model.estimate import RunCost

WIDTH_WITHOUT_TERMINAL = 160
_STDOUT, _STDERR = 1, 2  # their file descriptors, to which C code writes
_own: ContextVar[TextIO | None] = ContextVar("own stdout", default=None)
_GAP = 2  # columns between two columns of a table
_LEAST = 20


@contextmanager
def own_stdout() -> Iterator[None]:
    """Only `console` and `print_json` write to stdout meanwhile. What others print goes to stderr, from C code too."""
    with ExitStack() as stack:
        stream = sys.stdout
        if _descriptor(stream) == _STDOUT:
            stream.flush()
            stack.enter_context(suppress(BrokenPipeError))  # the reader may have left
            stream = stack.enter_context(open(os.dup(_STDOUT), "w", encoding=stream.encoding, errors=stream.errors))
            os.dup2(_STDERR, _STDOUT)
        stack.callback(_own.reset, _own.set(stream))
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # a stream in memory
        return None


def console(*, stderr: bool = False) -> "Screen":
    """A console; where there is no terminal, wide enough that tables are not cut, whatever ``COLUMNS`` says of one."""
    stdout = _own.get() or sys.stdout
    if stdout.isatty() and isinstance(sys.stdout, FileProxy):  # a spinner runs, above which this prints
        stdout = sys.stdout
    stream = sys.stderr if stderr else stdout
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    return Screen(file=stream, width=width, markup=False, highlight=False, emoji=False)  # mine:factory: is no picture


class Screen(Console):
    """A console on which the further lines of a long text stand further right than its first line."""

    def print(self, *objects: Any, **options: Any) -> None:
        if not options.get("soft_wrap"):
            objects = tuple(map(self.hanging, objects))
        super().print(*objects, **options)

    def hanging(self, text: Any) -> Any:
        """A text or a group as `print` shows it. A live display needs it, which renders by itself."""
        if isinstance(text, Group):
            return Group(*map(self.hanging, text.renderables))
        if not isinstance(text, str | Text):
            return text
        lines: list[Text] = []
        for line in Text(str(text)).split(allow_blank=True) if isinstance(text, str) else text.split(allow_blank=True):
            if cell_len(line.plain) <= self.width:
                lines.append(line)
                continue
            indent = len(line.plain) - len(line.plain.lstrip())
            labelled = re.match(r" *\S+ {2,}", line.plain)  # the text stands behind a label: +3.4%  tp 2
            further = labelled.end() if labelled else indent + _GAP
            parts = line[indent:].wrap(self, max(_LEAST, self.width - further))
            lines += [Text(" " * (further if at else indent)) + part for at, part in enumerate(parts)]
        return Text("\n").join(lines)


def print_json(data: Any) -> None:
    """Data as JSON on stdout, nothing else."""
    out = _own.get() or sys.stdout
    out.write(json.dumps(data, indent=1, sort_keys=True) + "\n")
    out.flush()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Table | Group:
    """A plain table. On a narrow terminal the widest texts stand below their row, then the last numbers."""
    screen_width = console().width
    widths = [max(cell_len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    beside, below = list(range(len(columns))), list[int]()
    while sum(widths[at] + _GAP for at in beside) - _GAP > screen_width and len(beside) > 1:
        widest = max(beside[1:], key=lambda at: (columns[at] not in right, at if columns[at] in right else widths[at]))
        beside.remove(widest)
        below.append(widest)
    if not below:
        grid = Table(box=None, show_header=any(columns), header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
        for column in columns:
            grid.add_column(Text(column), justify="right" if column in right else "left", overflow="fold")
        for row in rows:
            grid.add_row(*map(Text, row))
        return grid

    def line(cells: Sequence[str]) -> str:
        spaces = {at: " " * (widths[at] - cell_len(cells[at])) for at in beside}
        padded = (spaces[at] + cells[at] if columns[at] in right else cells[at] + spaces[at] for at in beside)
        return (" " * _GAP).join(padded).rstrip()

    lines = [Text(line(columns), style="bold")]
    for row in rows:
        lines.append(Text(line(row)))
        more = [(columns[at], row[at]) for at in sorted(below) if row[at]]
        numbers = ", ".join(f"{name} {cell}" for name, cell in more if name in right)
        for text in (numbers, *(f"{name}: {cell}" if name else cell for name, cell in more if name not in right)):
            lines += [Text(f"{'':{2 * _GAP}}{part}") for part in wrap(text, max(_LEAST, screen_width - 2 * _GAP))]
    return Group(*lines)


def print_sections(sections: Sequence[Section], out: Console) -> None:
    """An explanation."""
    for section in sections:
        out.print(Text(section.title, style="bold yellow" if section.is_warning else "bold"))
        for line in section.lines:
            out.print(Text(f"  {line}"))
        if section.rows:
            out.print(table(section.columns, section.rows, right=("copies", "calls", "times")))
        out.print()


def print_ends(notes: Sequence[str], *written: Path | None) -> None:
    """The last lines of a command: notes, and the files that it wrote."""
    for line in (*notes, *(f"written to {path}" for path in written if path is not None)):
        console().print(line)


def print_verdict(failed: Sequence[str], passed: str) -> None:
    """Whether checks passed, or the names of those that failed."""
    verdict = f"FAILED: {', '.join(failed)}" if failed else f"passed: {passed}"
    console().print(verdict, style="bold red" if failed else "bold green")


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr while something runs; yields a function that changes its text. Silent without a terminal."""
    remarks = io.StringIO()
    with console(stderr=True).status(Text(text)) as status, _quiet_logging():  # text may have colons and brackets
        try:
            with redirect_stderr(remarks):
                yield lambda now: status.update(Text(now))
        except AutoparError:
            raise
        except Exception:
            sys.stderr.write(remarks.getvalue())
            raise


@contextmanager
def progress_bar(text: str, *, shown: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr; yields a function of (done, total, next item). Silent without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=screen, transient=True, disable=not (shown and screen.is_terminal))
    task = bar.add_task(text, total=None)
    with bar, _quiet_logging():
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@contextmanager
def _quiet_logging() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def print_run(run: "RunCost", out: Console) -> None:
    """The time, money and energy of a whole run."""
    figures = {
        "tokens": run.tokens, "steps": run.steps, "days": run.days, "device hours": run.device_hours,
        "US dollars": run.price_usd, "kWh of the devices": run.energy_kwh, "kWh with hosts and cooling": run.site_kwh,
        "kg of CO2": run.co2_kg,
    }  # fmt: skip
    texts = [(n, f"{v:,.{2 if n == 'days' else 0}f}") for n, v in figures.items() if v is not None]
    out.print()
    out.print(table(("whole run", ""), texts, right=("",)))
