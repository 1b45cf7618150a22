"""The options that say how a search is done, declared once."""

from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.planning.options import TRIALS

_PANEL = "The search"


def _option(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel=_PANEL, show_default=False)


Objective = Annotated[
    str,
    _option(
        "The value to make small: time, cost, energy or memory. Cost and energy may use a part of the cluster. "
        "(default: time)"
    ),
]
Fix = Annotated[
    list[str] | None,
    _option("Allowed values of a degree, such as tp=8 or zero=1,3. May be repeated. --tp 8 is short for --fix tp=8."),
]
Forbid = Annotated[list[str] | None, _option("Forbidden values of a degree, such as schedule=gpipe. May be repeated.")]
Top = Annotated[int, _option("Number of other plans to show. (default: 5)")]
Trials = Annotated[
    int, _option(f"Variations of stage cuts to try. If there are more, Optuna chooses. (default: {TRIALS})")
]
Seed = Annotated[int, _option("Seed of Optuna's sampler. (default: 0)")]
Timeout = Annotated[
    float | None, _option("Seconds after which the search ends with the best plan so far and its gap. (default: none)")
]
Study = Annotated[
    str | None,
    _option(
        "Keep the search's prices and Optuna's trials in this .log file, .db file or database URL. Later searches and "
        "other processes continue it. (default: none)"
    ),
]
Measured = Annotated[
    Path | None,
    typer.Option(
        help="Measured steps that correct the device profile: a CSV file (columns of `autopar validate`), or a trace "
        "of one step of the model (`autopar trace`).",
        show_default=False,
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        help="Device profile, a file of `autopar calibrate`. (default: the cluster's, else the shipped profile)",
        show_default=False,
    ),
]
