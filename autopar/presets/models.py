"""Model presets: one JSON file per model in ``presets/models``, listed without importing torch or transformers.

A file holds the fields of a transformers config, the exact number of parameters that this config has, the published
number, and where both come from.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Annotated, Any

from pydantic import Field

from autopar.errors import InputError, did_you_mean
from autopar.files.strict_model import NamedModel, StrictModel, models_in
from autopar.presets.configs import KEYS

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,39}$")]
_Count = Annotated[int, Field(gt=0)]
_Source = Annotated[str, Field(min_length=8)]


class PublishedCount(StrictModel):
    """A published number of parameters. `not_built` has the parts of it that have no parameter in the model."""

    value: _Count
    is_rounded: bool
    source: _Source
    not_built: dict[str, _Count] = Field(default_factory=dict)


class ModelPreset(NamedModel):
    """One file of ``presets/models``. `num_parameters` counts a tied parameter once."""

    name: _Name
    description: str
    aliases: list[_Name]
    num_parameters: _Count
    published_parameters: PublishedCount
    config_source: _Source
    config: dict[str, Any]

    @property
    def context_length(self) -> int | None:
        """The longest sequence that the model was made for, in tokens; None where the config sets none."""
        text = self.config.get("text_config", self.config)
        return next((text[key] for key in _CONTEXT_KEYS if text.get(key)), None)

    @property
    def num_layers(self) -> int:
        """Transformer layers, of encoder and decoder or of both towers together."""
        towers = [self.config[key] for key in KEYS["towers"] if key in self.config] or [self.config]
        return sum(tower[key] for tower in towers for key in KEYS["layers"] if tower.get(key))


@functools.cache
def model_presets() -> dict[str, ModelPreset]:
    """Every preset by its name, sorted. Raises InputError when a file is malformed or a name is taken twice."""
    return models_in(ModelPreset, resources.files("autopar.presets") / "models", "model presets")


def model_names() -> tuple[str, ...]:
    """Every name and alias that `model_preset` accepts, sorted."""
    return tuple(sorted(name for preset in model_presets().values() for name in (preset.name, *preset.aliases)))


def model_preset(name: str) -> ModelPreset:
    """The preset of that name or alias, case ignored. Raises InputError naming the nearest."""
    wanted = name.lower().replace("_", "-")
    for preset in model_presets().values():
        if wanted == preset.name or wanted in preset.aliases:
            return preset
    raise InputError(f"unknown model preset {name[:80]!r}; {did_you_mean(name, model_names())}")
