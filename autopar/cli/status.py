"""`autopar status`: a run directory while its run goes on."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.command import Answer
from autopar.cli.options import Json, positional
from autopar.cli.output import console, table
from autopar.errors import InputError
from autopar.files.strict_text import values_of
from autopar.words.numbers import amount, duration, percent, readable_bytes, readable_seconds

if TYPE_CHECKING:
    from rich.console import Group

    from autopar.runs.status import RunStatus

_WIDTH = 60  # of the curve


def status(
    run: Annotated[Path, positional("RUN", "The directory of `autopar.Run`.")],
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Show it anew until the run is done. It may be started again meanwhile."),
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks with --follow.")] = 2.0,
    as_json: Json = False,
) -> Answer | None:
    """Show a training run: its last step, loss, throughput, memory, and whether its process lives.

    Measured times and memory stand beside the plan's own prediction, and where 4 of 5 measurements should be.

    Example: autopar status runs/first --follow
    """
    from autopar.runs.status import run_status

    if not interval > 0 or not math.isfinite(interval):
        raise InputError(f"--interval must be a number above 0; got {interval}")
    if follow and as_json:
        raise InputError("--follow and --json exclude each other; --json prints the run once")
    with values_of(run, "start the run in another folder"):
        now = run_status(run)
        if not follow:
            shown = _shown(now)
            return Answer(data=now.to_dict(), show=lambda: console().print(shown))
        from rich.live import Live

        out = console()
        with Live(out.hanging(_shown(now)), console=out, auto_refresh=False) as screen:
            while now.state != "done":
                time.sleep(interval)
                now = run_status(run)
                screen.update(out.hanging(_shown(now)), refresh=True)
    return None


def _shown(now: "RunStatus") -> "Group":
    from rich.console import Group
    from rich.text import Text

    from autopar.runs.status import sparkline

    state = f"{now.state}: {now.detail}" if now.detail else now.state
    parts = [Text(f"{now.model or 'a model'}, {now.num_ranks} rank{'s' * (now.num_ranks > 1)}, {state}", style="bold")]
    parts += [Text(f"  {line}") for line in _lines(now)]
    if len(now.losses) > 1:
        values = [loss for _, loss in now.losses]
        finite = [loss for loss in values if math.isfinite(loss)]
        span = f"{max(finite):.4g} to {min(finite):.4g}" if finite else "no finite loss"
        parts.append(Text(f"  loss of steps {now.losses[0][0]} to {now.losses[-1][0]}, {span}"))
        parts.append(Text(f"  {sparkline(values, _WIDTH)}"))
    figures = _figures(now)
    return Group(*parts, table(("", "measured", "predicted"), figures, right=("measured", "predicted")))


def _lines(now: "RunStatus") -> list[str]:
    """What a person asks first, as sentences."""
    if now.step is None or now.loss is None:
        return ["no step has been logged"]
    of = f" of {now.total_steps:,}" if now.total_steps else ""
    known = [("learning rate", now.learning_rate), ("gradient norm", now.gradient_norm), *now.extra.items()]
    more = "".join(f", {name} {value:.4g}" for name, value in known if value is not None)
    lines = [f"step {now.step:,}{of}, loss {now.loss:.4f}{more}"]
    times = [] if now.age_s is None else [f"last written {duration(now.age_s)} ago"]
    times += [] if now.left_s is None else [f"{duration(now.left_s)} left"]
    times += [f"{now.num_tokens:,} tokens"] if now.num_tokens else []
    lines.append(", ".join(times))
    saved = "no checkpoint in the run directory"
    if now.checkpoint is not None:
        saved = f"last checkpoint: step {now.checkpoint.step:,}, {duration(now.checkpoint.age_s)} ago"
    lines.append(saved)
    counts = (
        (now.num_skipped, "skipped"),
        (now.num_replaced, "replaced after a restart"),
        (now.num_damaged, "damaged"),
    )
    odd = [f"{count:,} {what}" for count, what in counts if count]
    if odd:
        lines.append(f"lines of steps: {', '.join(odd)}")
    if now.num_starts > 1:
        lines.append(f"{now.num_starts} starts")
    return lines


def _figures(now: "RunStatus") -> list[tuple[str, str, str]]:
    wanted, on_gpu = now.predicted, now.device_type == "cuda"

    def share(part: float) -> str:
        return percent(part, 1)

    def shown(name: str, text: Callable[[float], str]) -> str:
        return _text(getattr(wanted, name, None), text)

    def between(name: str, text: Callable[[float], str]) -> str:
        ends = getattr(wanted, name, None)
        return f" ({text(ends[0])} to {text(ends[1])})" if ends else ""

    step = shown("step_s", readable_seconds) + between("step_interval_s", readable_seconds)
    rows = [
        ("step time", _text(now.step_s, readable_seconds), step),
        ("tokens/s", _text(now.tokens_per_s, amount), shown("tokens_per_s", amount)),
        ("samples/s", _text(now.samples_per_s, amount), shown("samples_per_s", amount)),
        ("MFU", _text(now.mfu, share), shown("mfu", share)),
    ]
    peak = _text(now.peak_bytes, readable_bytes)
    what = f"memory of rank {now.peak_rank}" if now.peak_rank is not None else "memory"
    predicted = shown("peak_bytes", readable_bytes) + between("peak_interval_bytes", readable_bytes)
    rows.append((what, peak, predicted) if on_gpu else (f"{what}, whole process", peak, "-"))
    if wanted and on_gpu:
        rows.append(("memory of the device", readable_bytes(wanted.device_bytes), ""))
    return rows


def _text(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)
