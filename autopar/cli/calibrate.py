"""`autopar calibrate`: measure this machine, fit a device profile, write it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.command import Answer
from autopar.cli.options import option, problems_of_ranks, problems_of_target, refuse_options
from autopar.cli.output import console, print_ends, progress_bar, table
from autopar.errors import Problem
from autopar.words.numbers import readable_seconds

if TYPE_CHECKING:
    from autopar.commands.calibrate import Calibration
    from autopar.cost_model.machine.profile import DeviceProfile

MAX_MINUTES = 120.0


def calibrate(
    out: Annotated[Path | None, option("Write the profile to this file (YAML).", "--out", "-o")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", help="Start this many CPU ranks on this machine, and measure their links too."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Minutes of measuring, about.")] = 3.0,
) -> Answer:
    """Measure the speed of this machine, and fit the device profile that predictions use.

    One process measures matrix products, attention, memory traffic and kernel launches on the first GPU, else on the
    CPU. Several ranks also measure collectives, and how computation and communication slow each other down.

    The profile has a value, a source and a date for every number, and the error of the fit.

    Example on this machine: autopar calibrate --ranks 4 --out device.yaml

    Example on a cluster: torchrun --nproc-per-node 8 -m autopar calibrate --out device.yaml
    """
    problems = problems_of_ranks(ranks) + problems_of_target("--out", out)
    if not 0 < minutes <= MAX_MINUTES:
        problems.append(Problem(path="--minutes", value=minutes, rule=f"must be above 0 and at most {MAX_MINUTES:g}"))
    refuse_options(problems)
    is_first = os.environ.get("RANK", "0") == "0"
    with progress_bar("importing torch", shown=is_first) as on_progress:
        from autopar.commands.calibrate import calibrate as measure
        from autopar.commands.calibrate import to_dict
        from autopar.commands.doctor import leave

        result = measure(ranks=ranks, minutes=minutes, on_progress=on_progress)
        leave()
    if not is_first:
        raise typer.Exit()
    if out is not None:
        from autopar.cost_model.machine.profile_io import dump_profile

        dump_profile(result.profile, out)
    return Answer(data=to_dict(result), show=lambda: _show(result, out))


def _show(result: "Calibration", out: Path | None) -> None:
    profile, screen = result.profile, console()
    assert profile.measured is not None and profile.device is not None
    seconds = profile.measured.seconds
    screen.print(f"{profile.device.name}: {profile.measured.how}, {seconds:.0f} s\n", style="bold")
    columns = ("constant", "fitted", "of")
    screen.print(table(columns, _rows(profile), right=("fitted",)))
    screen.print()
    headings = ("fit", "measurements", "median error", "90 % are within")
    rows = [(name, str(e.num_points), f"{e.median:.1%}", f"{e.p90:.1%}") for name, e in profile.fit.items()]
    screen.print(table(headings, rows, right=headings[1:]))
    screen.print()
    if result.num_skipped:
        screen.print(f"note: {result.num_skipped} works took too long and were left out; --minutes gives more time")
    if result.is_disturbed:
        text = f"passes differ by {result.spread:.0%}: this machine did other things; calibrate again when it does not"
        screen.print(f"note: {text}", style="yellow")
    print_ends([f"note: {sentence}" for sentence in profile.assumptions()], out)


def _rows(profile: "DeviceProfile") -> list[tuple[str, str, str]]:
    """The constants that predictions use, each with its reference figure."""
    device, tile, attention = profile.device, profile.tile, profile.attention
    assert device is not None
    peaks = {d: f"{device.peak_flops_per_s[d] / 1e12:.4g} TFLOP/s" for d in device.peak_flops_per_s}
    rows = [(f"products {d}", f"{part:.1%}", peaks.get(d, "")) for d, part in profile.efficiency.items()]
    rows.append(("tile", f"{tile.m:g} x {tile.n:g}", f"{tile.units:g} at once"))
    rows.append(("half efficiency at inner size", f"{tile.k_half:g}", ""))
    for name in ("forward", "backward", "products"):
        rows.append((f"attention {name}", f"{getattr(attention, name):.1%}", "the dtype's peak"))
    halves = [attention.keys_at_half(is_backward) for is_backward in (False, True)]
    rows.append(("half efficiency at keys", f"{halves[0]:g}, backward {halves[1]:g}", ""))
    speed = f"{device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s"
    rows.append(("memory", f"{profile.memory_efficiency:.1%}", speed))
    rows.append(("launch", readable_seconds(profile.launch_s), "a kernel"))
    if profile.host_launch_s:
        rows.append(("launch on the host", readable_seconds(profile.host_launch_s), "an operator"))
    for tier, cost in profile.links.items():
        link = cost.link
        of = f"{link.bytes_per_s / 1e9:.4g} GB/s, {readable_seconds(link.latency_s)} a hop" if link else "the cluster's"
        for kind, call in cost.kinds.items() or (("all kinds", cost.usual),):
            rows.append((f"{tier} {kind}", f"{call.efficiency:.1%} + {readable_seconds(call.call_s)}", of))
    rows.append(("overlap slowdown", f"{profile.overlap_slowdown:.2f}", "the longer of both"))
    rows.append(("reserve", f"{profile.reserve_bytes / 1e9:.2f} GB", "memory"))
    return rows
