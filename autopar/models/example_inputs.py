"""Inputs for one training step of a transformers model, derived from its config."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError, Problem

if TYPE_CHECKING:
    import torch

DEFAULT_BATCH = 2  # at batch 1 the batch dimension cannot be told from a broadcast one
MAX_DEFAULT_SEQ_LEN = 4096
DEFAULT_SEQUENCE = 128  # of a rank's inputs
ExampleInputs = dict[str, Any] | tuple[Any, ...]
_MAIN_INPUTS = ("input_ids", "pixel_values", "input_features")
_TOKEN_LABELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
_CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "max_target_positions")
# positions are numbered from behind the padding id on
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl")
_WHAT_TO_PASS = (
    "pass example_inputs: a dict of the forward's keyword arguments or a tuple of its positional ones, "
    "tensors with the global batch as the first dimension"
)


def example_inputs_for(model: torch.nn.Module, batch: int | None = None, seq_len: int | None = None) -> dict[str, Any]:
    """Keyword arguments for one training step of a transformers model, derived from its config.

    Shapes: ``input_ids`` and ``labels`` are two distinct int64 tensors of (batch, seq_len). ``pixel_values`` is (batch,
    channels, height, width). ``input_features`` is (batch, mel bins, frames). ``labels`` of a classifier is (batch,). A
    model that contrasts two inputs gets both and ``return_loss=True``.

    The tensors lie on the device of the model's parameters: meta tensors for a meta model, otherwise seeded random
    ones. Raises `InputError` for any other model, and says which inputs to pass.
    """
    check_sizes(seq_len=seq_len, batch=batch)
    kind, config = type(model).__name__, getattr(model, "config", None)
    main_input = getattr(model, "main_input_name", None)
    if config is None or main_input not in _MAIN_INPUTS or not hasattr(config, "to_dict"):
        raise InputError(f"{kind} does not say what its inputs are; {_WHAT_TO_PASS}")
    known = inspect.signature(model.forward).parameters
    batch = DEFAULT_BATCH if batch is None else batch
    inputs: dict[str, Any] = {}
    if "input_ids" in known:
        inputs["input_ids"] = _tensor(model, (batch, _sequence(config, seq_len)), _vocab_size(config))
    if "pixel_values" in known:
        inputs["pixel_values"] = _tensor(model, (batch, *_image_shape(config)))
    if "input_features" in known:
        inputs["input_features"] = _tensor(model, (batch, config.num_mel_bins, 2 * config.max_source_positions))
    if "return_loss" in known:
        return inputs | {"return_loss": True}
    if "labels" not in known:
        raise InputError(f"{kind} takes no labels and so has no loss; {_WHAT_TO_PASS}, and a loss_fn")
    return inputs | {"labels": _labels(model, config, batch, seq_len)}


def derived_inputs(model: torch.nn.Module) -> dict[str, Any]:
    """One rank's inputs that the model's transformers config decides. Raises `InputError` without one."""
    try:
        return example_inputs_for(model, DEFAULT_BATCH, DEFAULT_SEQUENCE)
    except InputError as error:
        raise InputError(
            f"{type(model).__name__} does not say what its inputs look like; pass example_inputs=..., a dict or tuple "
            f"with the tensors of one rank's batch ({error})"
        ) from error


def _labels(model: torch.nn.Module, config: Any, batch: int, seq_len: int | None) -> torch.Tensor:
    kind = type(model).__name__
    if kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        return _tensor(model, (batch,), config.num_labels, seed=1)
    if not kind.endswith((*_TOKEN_LABELS, "ForTokenClassification")):
        raise InputError(f"the labels of {kind} cannot be derived; {_WHAT_TO_PASS}")
    end = config.num_labels if kind.endswith("ForTokenClassification") else _vocab_size(config)
    return _tensor(model, (batch, _sequence(config, seq_len)), end, seed=1)


def default_seq_len(config: Any) -> int:
    """The context length of a config, at most 4096."""
    return min(_context_length(config) or MAX_DEFAULT_SEQ_LEN, MAX_DEFAULT_SEQ_LEN)


def _context_length(config: Any) -> int | None:
    text = config.get_text_config()
    lengths = (getattr(text, key, None) for key in _CONTEXT_KEYS)
    length: int | None = next((n for n in lengths if isinstance(n, int) and n > 0), None)
    if length is not None and config.model_type in _OFFSET_POSITIONS:
        length -= config.pad_token_id + 1
    return length


def _sequence(config: Any, seq_len: int | None) -> int:
    """The given number of tokens or the default one. Learned position tables end; rotary positions do not."""
    tokens, length = default_seq_len(config) if seq_len is None else seq_len, _context_length(config)
    if length is not None and tokens > length and not getattr(config, "rope_parameters", None):
        raise InputError(
            f"seq_len {tokens} is more than the {length} positions of the {config.model_type}; use {length} or less"
        )
    return tokens


def _vocab_size(config: Any) -> int:
    vocab = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(vocab, int):
        raise InputError(f"the {config.model_type} config has no vocab_size; {_WHAT_TO_PASS}")
    return vocab


def _image_shape(config: Any) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", config)
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return vision.num_channels, height, width


def _tensor(model: torch.nn.Module, shape: tuple[int, ...], end: int | None = None, *, seed: int = 0) -> torch.Tensor:
    """Whole numbers below `end`, or without it normal numbers in the dtype of the parameters."""
    import torch

    some = next(model.parameters(), torch.empty(0, device="meta"))
    dtype = some.dtype if end is None else torch.int64
    if some.is_meta:
        return torch.empty(shape, dtype=dtype, device="meta")
    generator = torch.Generator("cpu").manual_seed(seed)
    if end is None:
        return torch.randn(shape, generator=generator, device="cpu").to(some.device, dtype)
    return torch.randint(0, end, shape, generator=generator, device="cpu").to(some.device)


def check_sizes(**sizes: int | None) -> None:
    """Raise InputError naming every size that is no whole number above 0."""
    problems = [
        Problem(path=name, value=value, rule="must be a whole number greater than 0")
        for name, value in sizes.items()
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]
    if problems:
        raise InputError("the model's sizes cannot be used", problems)
