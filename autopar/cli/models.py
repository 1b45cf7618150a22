"""`autopar models`: the model presets."""

from autopar.cli.model_argument import Json
from autopar.cli.output import console, print_json, table
from autopar.presets.models import model_presets


def models(as_json: Json = False) -> None:
    """List the model presets."""
    presets = list(model_presets().values())
    if as_json:
        print_json(
            [
                {
                    "name": preset.name,
                    "aliases": preset.aliases,
                    "num_parameters": preset.num_parameters,
                    "context_length": preset.context_length,
                    "description": preset.description,
                    "source": preset.config_source,
                }
                for preset in presets
            ]
        )
        return
    rows = [
        (p.name, ", ".join(p.aliases), f"{p.num_parameters:,}", f"{p.context_length:,}", p.description) for p in presets
    ]
    out = console()
    out.print(table(("model", "also", "parameters", "context", "what it is"), rows, right=("parameters", "context")))
    out.print("\nMODEL may also be a transformers config.json, or package.module:factory.", markup=False)
