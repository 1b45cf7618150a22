"""The MODEL argument and the cluster that commands share."""

from typing import Annotated

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset such as llama3-8b (see `autopar models`), a transformers config.json, or "
        "package.module:factory or path/to/file.py:factory, a function that returns (model, example_inputs).",
        show_default=False,
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        help="<n>x<device> such as 64xh100 or 4xcpu (see `autopar clusters`), a YAML file (see docs/clusters.md), or "
        "detect.",
        show_default=False,
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(help="Number of layers, for a preset or config. (default: the model's own)", show_default=False),
]
Hidden = Annotated[
    int | None, typer.Option(help="Hidden size, for a preset or config. (default: the model's own)", show_default=False)
]
Specialise = Annotated[
    bool,
    typer.Option(
        "--specialise",
        help="Capture branches on inputs as the example inputs take them. Training captures other branches too.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
