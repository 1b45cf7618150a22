"""The MODEL argument that commands share."""

import os
from typing import Annotated

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset (see `autopar models`), a transformers config.json, or package.module:factory.",
        show_default=False,
    ),
]
Layers = Annotated[int | None, typer.Option(help="Shrink a preset or config to this many layers.", show_default=False)]
Hidden = Annotated[int | None, typer.Option(help="Shrink a preset or config to this width.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]


def is_factory(model: str) -> bool:
    """Whether MODEL names a function, which decides its own sizes."""
    return ":" in model and not model.endswith(".json") and os.sep not in model
