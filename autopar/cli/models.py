"""`autopar models`: the model presets."""

from collections.abc import Sequence

from autopar.cli.command import Answer
from autopar.cli.output import console, table
from autopar.presets.models import ModelPreset, model_presets


def models() -> Answer:
    """List the model presets: names that every command takes as MODEL.

    Example: autopar models --json
    """
    presets = list(model_presets().values())
    return Answer(data=[_entry(preset) for preset in presets], show=lambda: _show(presets))


def _entry(preset: ModelPreset) -> dict[str, object]:
    about = {
        "num_layers": preset.num_layers,
        "context_length": preset.context_length,
        "source": preset.config_source,
    }
    return preset.model_dump(exclude={"config", "config_source"}) | about


def _show(presets: Sequence[ModelPreset]) -> None:
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
