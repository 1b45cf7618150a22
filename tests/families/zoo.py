"""Every family as one tiny model: presets shrunk by their own rule, and what `plain` writes in torch.

Two layers, heads and widths that divide by 4, no dropout, random values for every parameter. `FAMILIES` maps a name to
a function of the batch; ``zoo:name`` is a factory for `autopar.commands.verify.verify` with `LOCAL_BATCH` sequences,
``zoo:name_of_12`` one with 12, and ``zoo:name_of_3_by_13`` one with 3 sequences of 13 tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import plain
import torch
from torch import nn

from autopar.models.load import resolve_model

Example = tuple[nn.Module, dict[str, Any]]
LAYERS, HIDDEN, TOKENS, LOCAL_BATCH = 2, 32, 16, 6
MORE_LAYERS = {"t5": 3}  # the first layer, which holds the relative positions, differs from the others

PRESETS = {
    "llama": "llama3-8b",
    "mistral": "mistral-7b",
    "qwen2": "qwen2-7b",
    "qwen3": "qwen3-8b",
    "gemma2": "gemma2-9b",
    "phi3": "phi3-mini",
    "phi3_grouped": "phi3-medium",
    "gpt2": "gpt2",
    "gpt_neox": "gpt-neox-20b",
    "falcon_multi_query": "falcon-7b",
    "falcon_grouped": "falcon-40b",
    "mpt": "mpt-7b",
    "opt": "opt-6.7b",
    "bert": "bert-large",
    "roberta": "roberta-large",
    "vit": "vit-l-16",
    "clip": "clip-vit-l-14",
    "t5": "t5-large",
    "whisper": "whisper-large",
    "mixtral": "mixtral-8x7b",
    "qwen2_moe": "qwen1.5-moe-a2.7b",
    "qwen3_moe": "qwen3-30b-a3b",
}
PLAIN = {
    "encoder": plain.encoder,
    "decoder": plain.decoder,
    "mixer": plain.mixer,
    "mlp": plain.mlp,
    "resnet": plain.resnet,
    "convnext": plain.convnext,
}
# larger values map all inputs of a tower to nearly one direction, and the gradients are lost in rounding
SCALES = {"clip": 0.1}
TRANSFORMERS = (*PRESETS, "encoder", "decoder")


def randomise(model: nn.Module, seed: int = 0, scale: float = 0.3) -> nn.Module:
    """Random values for every parameter: ones and zeros hide permutations. Scalars, which have none, stay."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * scale)
    return model


def _preset(family: str, batch: int, tokens: int = TOKENS) -> Example:
    found = resolve_model(
        PRESETS[family],
        layers=MORE_LAYERS.get(family, LAYERS),
        hidden=HIDDEN,
        seq_len=tokens,
        batch=batch,
        dtype="float64",
        device="cpu",
    )
    inputs = dict(found.example_inputs)
    if "labels" in inputs and inputs["labels"].dim() == 2:  # a different number of targets in each sequence
        for row in range(batch):
            inputs["labels"][row, 1 : 2 + row % 3] = -100
    return randomise(found.model, scale=SCALES.get(family, 0.3)), inputs


def _plain(factory: Callable[[int], Example], batch: int) -> Example:
    model, inputs = factory(batch)
    return randomise(model.double()), inputs


FAMILIES: Mapping[str, Callable[[int], Example]] = {
    **{family: partial(_preset, family) for family in PRESETS},
    **{name: partial(_plain, factory) for name, factory in PLAIN.items()},
}


class Sizes(NamedTuple):
    """The sizes in the name of a factory."""

    family: str
    batch: int | None
    tokens: int | None


def sizes_of(name: str) -> Sizes:
    """A family, its sequences and the tokens of each.

    >>> sizes_of("gpt2_of_3_by_13")
    Sizes(family='gpt2', batch=3, tokens=13)
    """
    name, _, tokens = name.partition("_by_")
    family, _, batch = name.partition("_of_")
    return Sizes(family, int(batch) if batch else None, int(tokens) if tokens else None)


def __getattr__(name: str) -> Callable[[], Example]:
    family, batch, tokens = sizes_of(name)
    if family not in FAMILIES:
        raise AttributeError(name)
    factory = partial(FAMILIES[family], batch or LOCAL_BATCH)
    return partial(factory, tokens=tokens) if tokens else factory
