"""A transformers ``config.json``: read within bounds, and shrunk consistently. Plain dictionaries; no torch.

**The scaling rule** (`scaled_config`). ``layers`` replaces every layer count. Lists with one entry per layer, and lists
of layers, are cut or repeated. At most half of the layers are leading dense ones. ``hidden`` (a multiple of 16)
replaces the residual width, and everything that depends on it follows so that it stays divisible by 2, 4 and 8:

- There are 8 heads of hidden / 8. A model with as many key/value heads as heads keeps that. One key/value head stays
  one. Any other number becomes half of the heads.
- Feed-forward widths keep their ratio to hidden. They are rounded to a multiple of 16.
- The vocabulary is 512, or the model's own if it is smaller.
- The ranks of latent attention scale as feed-forward widths do. Of the sizes of a head, the largest becomes hidden / 8.
  The others keep their ratio to it and stay even.
- There are at most 8 experts, and at most 2 work on a token. A group has at least 2 experts. The share of groups that a
  token chooses stays.
- Sliding windows, chunks of attention and steps of its temperature have at most 8 tokens. So they matter in short
  sequences.
- Images have 4 × 4 patches of 4 × 4 pixels. The encoder of audio has 32 positions.

When hidden is a multiple of 48 all of these are divisible by 3 as well: 24 heads, 12 key/value heads, feed-forward
multiples of 48, vocabulary 768. A config of several towers (``text_config``, ``vision_config``) has each of them
scaled. Context length stays. Token ids beyond the new vocabulary are dropped (the decoder's start token, and what pads
its inputs, becomes 0). Every dropout becomes 0, because a scaled model is one for verification.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.errors import InputError, Problem
from autopar.files.strict_text import read_json

MAX_CONFIG_BYTES = 1024 * 1024
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1

# the keys of configs by their meaning
KEYS: Mapping[str, list[str]] = json.loads((resources.files("autopar.presets") / "config_keys.json").read_text("utf-8"))
NOPE_KEY, ROPE_KEY, VALUE_KEY = KEYS["parts of a head"]  # in latent attention
EXPERT_KEYS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
GROUP_KEY, CHOSEN_GROUP_KEY = "n_group", "topk_group"
LEADING_DENSE_KEY = "first_k_dense_replace"
SMALL_PATCH, SMALL_PATCHES, SMALL_AUDIO, SMALL_WINDOW = 4, 4, 32, 8
_NO_SIZES = ("layers", "numbers of layers", "windows", "towers")
_SIZE_KEYS = frozenset(key for meaning, keys in KEYS.items() if meaning not in _NO_SIZES for key in keys)
# kernels that a config may name; any other name makes transformers fetch code from a hub
_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config file, its fields unchecked. Raises InputError with every problem of its form."""
    content, problems = read_json(path, max_bytes=MAX_CONFIG_BYTES)
    if not problems and not isinstance(content, dict):
        problems.append(Problem(path=str(path), value=content, rule="must be a JSON object"))
    if problems or not isinstance(content, dict):
        raise InputError(f"model config {str(path)!r} cannot be used", problems)
    return content


def check_config(config: Mapping[str, Any]) -> list[Problem]:
    """Problems of the fields that have a meaning here. Kernels on a hub are refused: nothing is ever fetched."""
    problems = []
    if not isinstance(config.get("model_type"), str):
        value = config.get("model_type")
        problems.append(Problem(path="model_type", value=value, rule="is required: the architecture, such as 'llama'"))
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(one, str) for one in architectures):
        problems.append(Problem(path="architectures", value=architectures, rule="must be a list of class names"))
    if config.get("quantization_config") is not None:
        problems.append(Problem(path="quantization_config", rule="quantized models cannot be trained; remove the key"))
    for key, value in config.items():
        limit = MAX_LAYERS if key in KEYS["layers"] else MAX_SIZE if key in _SIZE_KEYS else None
        if limit is not None and value is not None and not _is_count(value, limit):
            problems.append(Problem(path=key, value=value, rule=f"must be a whole number from 1 to {limit:,}"))
        if key in _IMPLEMENTATIONS and value is not None and value not in _IMPLEMENTATIONS[key]:
            rule = f"must be one of {', '.join(_IMPLEMENTATIONS[key])}: nothing is fetched from a hub"
            problems.append(Problem(path=key, value=value, rule=rule))
    known = {problem.path for problem in problems}
    return problems + [problem for problem in _wrong_numbers(config, "") if problem.path not in known]


def _wrong_numbers(config: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Numbers with which a model is built, and computes nothing that means anything."""
    for key, value in config.items():
        here = f"{path}{key}"
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(value, Mapping):
            yield from _wrong_numbers(value, f"{here}.")
        elif str(key).endswith(("_eps", "_epsilon")) and value is not None and not (is_number and 0 < value < 1):
            yield Problem(path=here, value=value, rule="must be a number above 0 and below 1")
        elif key == "rope_theta" and value is not None and not (is_number and 1 <= value <= MAX_SIZE):
            yield Problem(path=here, value=value, rule=f"must be a number from 1 to {MAX_SIZE:,}")
        elif isinstance(value, int) and abs(value) > MAX_SIZE:
            yield Problem(path=here, value=value, rule=f"must be at most {MAX_SIZE:,}")


def cleaned(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without ``auto_map`` (remote code) and private keys at any depth, and without kernel names in nested configs."""
    result = {}
    for key, value in config.items():
        if isinstance(key, str) and (key.startswith("_") or key == "auto_map"):
            continue
        if isinstance(value, dict):
            nested = cleaned(value)
            value = {inner: nested[inner] for inner in nested if inner not in _IMPLEMENTATIONS}
        result[key] = value
    return result


def scaled_config(config: Mapping[str, Any], *, layers: int | None = None, hidden: int | None = None) -> dict[str, Any]:
    """A copy of a config with `layers` layers and residual width `hidden`, by the rule in this module's docstring."""
    result = dict(config)
    towers = [key for key in KEYS["towers"] if isinstance(config.get(key), Mapping)]
    if towers:
        for key in towers:
            result[key] = scaled_config(config[key], layers=layers, hidden=hidden)
        if hidden is not None and result.get("projection_dim") is not None:
            result["projection_dim"] = hidden
        return result
    problems = []
    if layers is not None:
        problems += _scale_layers(result, layers)
    if hidden is not None:
        problems += _scale_widths(result, hidden)
    if problems:
        raise InputError(f"model {config.get('model_type')!r} cannot be scaled", problems)
    for key, value in result.items():
        is_dropout = "dropout" in key or key.endswith("_pdrop") or key in ("drop_rate", "drop_path_rate")
        if is_dropout and isinstance(value, (int, float)) and not isinstance(value, bool):
            result[key] = 0.0
    return result


def _scale_layers(config: dict[str, Any], layers: int) -> list[Problem]:
    present = _present(config, KEYS["layers"])
    if not present:
        return [Problem(path="layers", rule=f"the config has none of the keys {', '.join(KEYS['layers'])}")]
    if not _is_count(layers, MAX_LAYERS):
        return [Problem(path="layers", value=layers, rule=f"must be a whole number from 1 to {MAX_LAYERS:,}")]
    num_before = config[present[0]]
    for key in present:
        config[key] = layers
    for key, value in config.items():
        if not isinstance(value, (list, tuple)):
            continue
        # one entry per layer (layer_types, window sizes): cut, or repeat the pattern
        is_per_layer = any(word in key for word in ("layer", "types", "window"))
        if key in KEYS["numbers of layers"]:
            config[key] = [index for index in range(layers) if index % num_before in value]
        elif is_per_layer and len(value) == num_before:
            config[key] = [value[index % num_before] for index in range(layers)]
    if config.get(LEADING_DENSE_KEY) is not None:
        config[LEADING_DENSE_KEY] = min(config[LEADING_DENSE_KEY], layers // 2)
    return []


def _scale_widths(config: dict[str, Any], hidden: int) -> list[Problem]:
    hidden_keys, head_keys = _present(config, KEYS["hidden"]), _present(config, KEYS["heads"])
    if not hidden_keys or not head_keys:
        rule = f"needs one of {', '.join(KEYS['hidden'])} and one of {', '.join(KEYS['heads'])} in the config"
        return [Problem(path="hidden", rule=rule)]
    before = config[hidden_keys[0]]
    if not _is_count(hidden, MAX_SIZE) or hidden % 16 or hidden > before:
        legal = max(16, min(before, (hidden + 8) // 16 * 16)) if _is_count(hidden, MAX_SIZE) else 64
        rule = f"must be a multiple of 16 and at most the model's own width, {before:,}"
        return [Problem(path="hidden", value=hidden, rule=rule, suggestion=f"use {legal}")]
    if hidden == before:
        return []
    unit, heads = (48, 24) if hidden % 48 == 0 else (16, 8)
    vocab = 16 * unit if unit == 48 else 512
    num_heads_before = config[head_keys[0]]
    for key in hidden_keys:
        config[key] = hidden
    for key in head_keys:
        config[key] = heads
    for key in _present(config, KEYS["key/value heads"]):
        config[key] = heads if config[key] == num_heads_before else 1 if config[key] == 1 else heads // 2
    for key in _present(config, [*KEYS["feed-forward"], *KEYS["latent ranks"]]):
        config[key] = max(unit, round(config[key] * hidden / before / unit) * unit)
    _scale_head_sizes(config, hidden // heads)
    for key in _present(config, KEYS["vocabulary"]):
        config[key] = min(config[key], vocab)
        _fit_token_ids(config, config[key])
    _scale_experts(config)
    for key in _present(config, KEYS["windows"]):
        config[key] = min(config[key], SMALL_WINDOW)
    if isinstance(config.get("image_size"), int) and isinstance(config.get("patch_size"), int):
        config["patch_size"] = min(config["patch_size"], SMALL_PATCH)
        config["image_size"] = min(config["image_size"], SMALL_PATCHES * config["patch_size"])
    for key in _present(config, ("max_source_positions",)):
        config[key] = min(config[key], SMALL_AUDIO)
    return []


def _present(config: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    return [key for key in keys if config.get(key) is not None]


def _scale_head_sizes(config: dict[str, Any], head_size: int) -> None:
    parts = {key: config[key] for key in _present(config, KEYS["parts of a head"])}
    sizes = {}  # new sizes by the old ones, for sizes that a config class derives from the parts
    for key, value in parts.items():
        config[key] = max(2, round(value * head_size / max(parts.values()) / 2) * 2)
        sizes[value] = config[key]
    if NOPE_KEY in parts and ROPE_KEY in parts:
        sizes[parts[ROPE_KEY]] = config[ROPE_KEY]
        sizes[parts[NOPE_KEY] + parts[ROPE_KEY]] = config[NOPE_KEY] + config[ROPE_KEY]
    for key in _present(config, (*KEYS["head size"], "qk_head_dim")):
        config[key] = sizes.get(config[key], head_size)


def _scale_experts(config: dict[str, Any]) -> None:
    for key in _present(config, EXPERT_KEYS):
        config[key] = min(config[key], EXPERT_KEYS[key])
    groups = config.get(GROUP_KEY)
    num_experts = next((config[key] for key in EXPERT_KEYS if "per_tok" not in key and config.get(key)), None)
    if not groups or num_experts is None:
        return
    fitting = [count for count in range(1, groups + 1) if num_experts % count == 0 and num_experts // count >= 2]
    config[GROUP_KEY] = max(fitting, default=1)
    if config.get(CHOSEN_GROUP_KEY):
        config[CHOSEN_GROUP_KEY] = max(1, round(config[CHOSEN_GROUP_KEY] * config[GROUP_KEY] / groups))


def _fit_token_ids(config: dict[str, Any], vocab: int) -> None:
    for key, value in config.items():
        ids = value if isinstance(value, list) else [value]
        if key.endswith("_token_id") and any(isinstance(each, int) and each >= vocab for each in ids):
            needed = key == "decoder_start_token_id" or (key == "pad_token_id" and config.get("is_encoder_decoder"))
            config[key] = 0 if needed else None


def _is_count(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit
