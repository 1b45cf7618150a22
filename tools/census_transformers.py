"""The models of transformers in the census: every model type with a language, image or audio head, and two layers."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from census_inputs import BATCH, TOKENS, Built, Entry, WithLoss, first_that_runs
from torch import nn

_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
)
_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)


_USUAL: Mapping[str, Callable[[Any], int]] = {  # of values that a configuration leaves open
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "num_key_value_heads": lambda config: config.num_attention_heads,
    "num_experts_per_tok": lambda config: 2,
    "n_group": lambda config: 1,
    "topk_group": lambda config: 1,
}


def transformers_entries() -> Iterator[Entry]:
    """Every model type with one of the heads above."""
    from transformers.models.auto import modeling_auto

    seen = set()
    for head in _HEADS:
        for kind, names in getattr(modeling_auto, head).items():
            name = names if isinstance(names, str) else names[0]
            if kind not in seen:
                seen.add(kind)
                yield Entry(package="transformers", name=name, build=partial(_transformers, kind, name))


def _transformers(kind: str, name: str) -> Built:
    """The model with two layers, or with its usual ones, and the first inputs that it runs with."""
    return first_that_runs(
        partial(_with_inputs, kind, name, shorten, make) for shorten in (True, False) for make in _INPUTS
    )


def _with_inputs(
    kind: str, name: str, shorten: bool, make: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]]
) -> Built:
    import transformers

    own = getattr(transformers, name).config_class
    config = transformers.CONFIG_MAPPING[kind]() if own is None else own()
    if shorten:
        _shorten(config)
    _complete(config, name)
    model = getattr(transformers, name)(config)
    inputs = dict(make(model, config))
    if "labels" not in inputs:
        model = WithLoss(model)
    return model, inputs, None


def _shorten(config: Any) -> None:
    for part in (config, *(getattr(config, name, None) for name in (*config.sub_configs, "text_config"))):
        for layers in _LAYERS:
            if part is not None and layers in vars(part) and isinstance(getattr(part, layers), int):
                setattr(part, layers, min(2, getattr(part, layers)))
        if part is not None and isinstance(vars(part).get("layer_types"), list):
            part.layer_types = part.layer_types[:2]


def _complete(config: Any, name: str) -> None:
    """Values without which a configuration makes no model that trains."""
    config.use_cache = False
    for token in ("pad_token_id", "decoder_start_token_id", "bos_token_id"):
        if getattr(config, token, None) is None:
            setattr(config, token, 0)
    for part in (config, getattr(config, "text_config", None)):
        for value, usual in _USUAL.items():
            if part is not None and vars(part).get(value, 0) is None:
                setattr(part, value, usual(part))
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for draws in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment"):
            if part is not None and vars(part).get(draws):  # branches on random numbers, and draws by NumPy
                setattr(part, draws, type(getattr(part, draws))(0))
    if "is_decoder" in vars(config) and not name.endswith("MaskedLM"):
        config.is_decoder = True
    if getattr(config, "languages", None):
        config.default_language = next(iter(config.languages))


def _derived(model: nn.Module, config: Any) -> Mapping[str, torch.Tensor]:
    """The inputs that autopar derives, or features of the usual length."""
    from autopar.models.example_inputs import example_inputs_for

    if model.main_input_name in ("input_values", "input_features") and "labels" in _arguments(model):
        return _features(model, config)
    if type(model).__name__.endswith("ForImageClassification") and not (
        hasattr(config, "image_size") and hasattr(config, "num_channels")
    ):
        pixels = torch.randn(BATCH, getattr(config, "num_channels", 3), 224, 224)
        return _with_labels(model, {"pixel_values": pixels}, torch.zeros(BATCH, dtype=torch.int64))
    found: dict[str, torch.Tensor] = example_inputs_for(model, BATCH, TOKENS)
    return found


def _features(
    model: nn.Module, config: Any, *, turned: bool = False, masked: bool = False
) -> Mapping[str, torch.Tensor]:
    """A sound as values or as features: (batch, frequencies, frames), or turned. The labels are tokens."""
    name = model.main_input_name
    if name not in ("input_values", "input_features"):
        raise NotImplementedError(f"features for the input {name!r}")
    bins = _anywhere(config, "input_dim", "num_mel_bins", "input_feat_per_channel", default=80)
    frames = (BATCH, 3000, bins) if turned else (BATCH, bins, 3000)
    sound = torch.randn(BATCH, 16_000) if name == "input_values" and not turned else torch.randn(frames)
    inputs = {str(name): sound}
    if masked:
        inputs["attention_mask"] = torch.ones(BATCH, 3000, dtype=torch.int64)
    return _with_labels(model, inputs, torch.randint(1, 20, (BATCH, 8)))


def _with_image(model: nn.Module, config: Any, count: int | None = None) -> Mapping[str, torch.Tensor]:
    """Tokens of which the first `count` ones stand for an image."""
    token = next(
        (getattr(config, n) for n in ("image_token_id", "image_token_index") if getattr(config, n, None)), None
    )
    if token is None or not {"pixel_values", "input_ids", "labels"} <= set(_arguments(model)):
        raise NotImplementedError("no image among the tokens")
    count = count or _anywhere(config, "image_seq_length", default=576)
    tokens = torch.full((BATCH, count + TOKENS), 3, device="cpu")
    tokens[:, :count] = token
    return {**_derived(model, config), "input_ids": tokens, "labels": torch.full_like(tokens, 3)}


def _of_text(model: nn.Module, config: Any) -> Mapping[str, torch.Tensor]:
    """Tokens alone."""
    of_classes = type(model).__name__.endswith("Classification")
    labels = torch.zeros(BATCH, dtype=torch.int64) if of_classes else torch.randint(3, 20, (BATCH, TOKENS))
    return _with_labels(model, {"input_ids": torch.randint(3, 20, (BATCH, TOKENS))}, labels)


def _longest(model: nn.Module, config: Any) -> Mapping[str, torch.Tensor]:
    """Tokens of the whole context."""
    from autopar.models.example_inputs import example_inputs_for

    found: dict[str, torch.Tensor] = example_inputs_for(model, BATCH)
    return found


def _patches(model: nn.Module, config: Any) -> Mapping[str, torch.Tensor]:
    """An image that is cut into patches, with their mask and the numbers of rows and columns."""
    vision = getattr(config, "vision_config", config)
    width = vision.num_channels * vision.patch_size**2
    inputs = {
        "pixel_values": torch.randn(BATCH, 16, width),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.int64),
        "spatial_shapes": torch.full((BATCH, 2), 4, device="cpu"),
    }
    return _with_labels(model, inputs, torch.zeros(BATCH, dtype=torch.int64))


def _with_labels(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], labels: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    return {**inputs, "labels": labels} if "labels" in _arguments(model) else inputs


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _anywhere(config: Any, *names: str, default: int) -> int:
    """An attribute of a configuration or of a part of it."""
    parts = (config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", ())))
    found = (getattr(part, name, None) for name in names for part in parts)
    return next((value for value in found if isinstance(value, int)), default)


_INPUTS = (  # tried in this order
    _with_image, partial(_with_image, count=256), _derived, _features, partial(_features, turned=True),
    partial(_features, turned=True, masked=True), _of_text, _patches, _longest,
)  # fmt: skip
