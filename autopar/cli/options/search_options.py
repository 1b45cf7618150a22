"""The options that say how a search is done, declared once."""

from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.planning.options import TRIALS


def _option(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="How the search is done", show_default=False)


Objective = Annotated[
    str,
    _option("What is made small: time, cost, energy (both also on a part of the cluster) or memory. (default: time)"),
]
Fix = Annotated[
    list[str] | None,
    _option("A degree and the values it may have, such as tp=8 or zero=1,3; may be repeated. --tp 8 is the same."),
]
Forbid = Annotated[list[str] | None, _option("The values a degree must not have, such as schedule=gpipe.")]
Top = Annotated[int, _option("How many other plans are shown. (default: 5)")]
Trials = Annotated[
    int, _option(f"Variations of stage cuts to try; of more than these Optuna chooses. (default: {TRIALS})")
]
Seed = Annotated[int, _option("Of Optuna's sampler. (default: 0)")]
Timeout = Annotated[
    float | None, _option("Seconds after which the best so far is taken, with its gap. (default: none)")
]
Study = Annotated[
    str | None,
    _option("Keep Optuna's trials there, for several processes and the next time: x.journal, x.db or a database."),
]
WhatIf = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Also search what autopar prices and does not run yet: context and expert parallelism, the optimizer on "
        "the host. (default: no)",
        rich_help_panel="How the search is done",
        show_default=False,
    ),
]
Precision = Annotated[
    str | None, typer.Option(help="bf16, fp16, fp8 or fp32. (default: bf16; fp32 on CPUs)", show_default=False)
]
Profile = Annotated[
    Path | None,
    typer.Option(
        help="Device profile, as `autopar calibrate` writes. (default: the cluster's, else the one shipped)",
        show_default=False,
    ),
]
