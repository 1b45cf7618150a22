"""`autopar report`: a search, its trials or a plan as a page to read, and the predicted time line as a trace."""

from pathlib import Path
from typing import Annotated

from autopar.cli.options import option, positional
from autopar.cli.output import console
from autopar.errors import InputError
from autopar.files.strict_text import values_of

_AGAIN = "write it again with the command that made it"


def report(
    source: Annotated[
        str,
        positional(
            "RESULT",
            "A file with the output of `autopar plan --json` or `autopar tune --json`, a study (file or database "
            "URL), a plan file, or the directory of a run.",
        ),
    ],
    out: Annotated[Path | None, option("Write the page to this file (HTML).", "--out", "-o")] = None,
    perfetto: Annotated[
        Path | None,
        option("Write the predicted time line to this file, for ui.perfetto.dev."),
    ] = None,
) -> None:
    """Write a page about a search, a plan or a training run.

    Of a search it shows the best plan and the reason, time, memory and all candidates. Of `autopar tune` it
    shows predicted against measured step times, and what is left; of a run its curves.

    The page is one HTML file that needs no network.

    Example: autopar plan gpt2 -c 8xh100 --json > result.json; autopar report result.json -o report.html
    """
    from autopar.report.write import read_source, write_report, write_trace

    with values_of(source, _AGAIN):
        result = read_source(source)
    if out is None and perfetto is None:
        raise InputError("nothing to write; give --out report.html, --perfetto trace.json or both")
    with values_of(source, _AGAIN):
        sizes = {path: write(result, path) for path, write in ((out, write_report), (perfetto, write_trace)) if path}
    for path, size in sizes.items():
        console().print(f"written to {path} ({size / 1000:,.0f} kB)")
