"""`autopar report`: a search or a plan as a page to read, and the predicted time line as a trace."""

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.output import console
from autopar.errors import InputError


def report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RESULT",
            help="What `autopar plan --json` printed, its --study (a file or a database's URL), or a plan file.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the page there, one HTML file.", show_default=False)
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Write the predicted time line there, for ui.perfetto.dev.", show_default=False),
    ] = None,
) -> None:
    """Write a page about the search in RESULT, or about a plan: what is fastest and why, time, memory, candidates.

    For example: autopar plan llama3-8b -c 64xh100 --global-batch 256 --json > result.json; autopar report result.json
    --out report.html. The page is one file that needs no network.
    """
    from autopar.report.write import read_source, write_report, write_trace

    if out is None and perfetto is None:
        raise InputError("nothing to write; give --out report.html, --perfetto trace.json or both")
    found = read_source(source)
    stdout = console()
    for path, write in ((out, write_report), (perfetto, write_trace)):
        if path is not None:
            stdout.print(f"written to {path} ({write(found, path) / 1000:,.0f} kB)")
