"""`autopar models`: the model presets."""

from autopar.cli.options import Json
from autopar.cli.output import console, print_json, table
from autopar.presets.models import model_presets


def models(as_json: Json = False) -> None:
    """List the model presets: names that every command takes as MODEL.

    Example: autopar models --json
    """
    presets = list(model_presets().values())
    if as_json:
        print_json(
            [
                {
                    "name": preset.name,
                    "aliases": preset.aliases,
                    "num_parameters": preset.num_parameters,
                    "published_parameters": preset.published_parameters.model_dump(),
                    "num_layers": preset.num_layers,
                    "context_length": preset.context_length,
                    "description": preset.description,
                    "source": preset.config_source,
                }
                for preset in presets
            ]
        )
        return
    rows = [
        (
            preset.name,
            f"{preset.num_parameters:,}",
            str(preset.num_layers),
            f"{preset.context_length:,}" if preset.context_length else "",
            preset.description,
            preset.config_source,
        )
        for preset in presets
    ]
    columns = ("model", "parameters", "layers", "context", "description", "source")
    out = console()
    out.print(table(columns, rows, right=("parameters", "layers", "context")))
    out.print("\nMODEL is one of these names, a transformers config.json, package.module:factory or file.py:factory.")
