"""From the argument MODEL to a module and example inputs.

MODEL is a preset's name, a transformers ``config.json``, ``package.module:factory``, or ``path/to/file.py:factory``.

autopar fetches nothing and runs nothing from a config. torch and transformers are imported only to build a model, so
unknown names and bad files fail fast.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from autopar.errors import InputError, Problem, did_you_mean
from autopar.files.strict_text import values_of
from autopar.ir.precision import like_kind
from autopar.ir.trained import trained_from
from autopar.models.example_inputs import ExampleInputs, check_sizes, example_inputs_for
from autopar.presets.configs import check_config, cleaned, read_config, scaled_config
from autopar.presets.models import model_names, model_preset
from autopar.words.numbers import readable_count

if TYPE_CHECKING:
    import torch

_DTYPES = ("float64", "float32", "bfloat16", "float16")

# by the end of the architecture's class name, and the mapping that must know the config; the first match counts
_AUTO_CLASSES = (
    ("ForCausalLM", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("LMHeadModel", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("ForMaskedLM", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("ForConditionalGeneration", "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("ForConditionalGeneration", "AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    ("ForSequenceClassification", "AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
    ("ForTokenClassification", "AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"),
    ("ForImageClassification", "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
    ("Model", "AutoModel", "MODEL_MAPPING"),
)
# keys that every config may have though no config class names them
_COMMON_KEYS = (
    "architectures", "transformers_version", "torch_dtype", "dtype", "rope_theta", "rope_scaling", "head_dim"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ResolvedModel:
    """A module and inputs to capture it with."""

    name: str
    kind: Literal["preset", "config", "factory"]
    model: torch.nn.Module
    example_inputs: ExampleInputs
    config: Mapping[str, Any] | None = None  # of transformers; None for a factory
    loss_fn: Callable[..., torch.Tensor] | None = None  # a factory's, of (output, target)
    notes: tuple[str, ...] = ()  # for the user

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, a tied one counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def __repr__(self) -> str:
        return f"ResolvedModel({self.name!r}, {type(self.model).__name__}, {self.num_parameters:,} parameters)"


def resolve_model(
    spec: str,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    seq_len: int | None = None,
    batch: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "meta",
    trains: str = "all",
) -> ResolvedModel:
    """The model that `spec` names, in training mode, with example inputs.

    Args:
        spec: A preset's name, a path to a transformers ``config.json`` or its folder, ``package.module:factory``, or
            ``path/to/file.py:factory``. A ``factory()`` returns ``(model, example_inputs)``; the inputs are a dict or a
            tuple. If the model returns no loss, a third element is the ``loss_fn``. It decides all sizes itself: only
            `dtype` applies to it.
        layers: Number of layers of a smaller model (`autopar.presets.configs` has the rule; every dropout becomes 0).
        hidden: Width of a smaller model, by the same rule.
        seq_len: Tokens of a sequence; by default the context length, at most 4,096.
        batch: Sequences of the inputs; 2 by default.
        dtype: Dtype of the parameters; float32 by default, whatever dtype the config's stored weights have.
        device: Device of presets and configs; "meta" by default, which needs no memory.
        trains: The parameters that are trained (`autopar.ir.trained`).

    Raises:
        InputError: An unknown preset, a bad file, a module that cannot be imported, a factory that fails, or sizes that
            the model cannot have.
    """
    check_sizes(layers=layers, hidden=hidden, seq_len=seq_len, batch=batch)
    wanted = checked_dtype(dtype)
    if is_factory(spec):
        given = {"layers": layers, "hidden": hidden, "seq_len": seq_len, "batch": batch}
        refused = [name for name, value in given.items() if value is not None]
        if refused:
            raise InputError(f"{', '.join(refused)}: a factory decides its own sizes; change {spec} instead")
        return _training(_from_factory(spec, wanted if dtype is not None else None), trains)
    config, name, kind = config_named(spec)
    file = Path(spec, "config.json") if os.path.isdir(spec) else Path(spec)
    with values_of(file, "compare it with a config.json of this model") if kind == "config" else nullcontext():
        cfg, notes = _config_object(config)
        changed = {key: value for key, value in (("layers", layers), ("hidden", hidden)) if value is not None}
        if changed:
            cfg, _ = _config_object(scaled_config(cfg.to_dict(), **changed))
            sizes = ", ".join(f"{key}={value}" for key, value in changed.items())
            notes += (f"{name} scaled to {sizes}; every dropout is 0",)
        if _multiplies_in_batches(cfg, wanted):
            notes += ("in float64 experts are computed by batched_mm, in other dtypes by grouped_mm: the same numbers",)
        model = _build(cfg, wanted, device)
        inputs = example_inputs_for(model, batch=batch, seq_len=seq_len)
        resolved = ResolvedModel(
            name=name, kind=kind, model=model, example_inputs=inputs, config=cfg.to_dict(), notes=notes
        )
        return _training(resolved, trains)


def _training(resolved: ResolvedModel, trains: str) -> ResolvedModel:
    """A model that trains these parameters, with a note of their number."""
    trained = trained_from(trains)
    if trained.kind == "all":
        return resolved
    from autopar.models.adapters import with_trained

    model = with_trained(resolved.model, trained)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    note = f"trains {trains}: {readable_count(count)} of {readable_count(resolved.num_parameters)} parameters"
    return replace(resolved, model=model, notes=(*resolved.notes, note))


# ---- presets and configs ----


def config_named(spec: str) -> tuple[dict[str, Any], str, Literal["preset", "config"]]:
    """The fields of the config that `spec` names, unchecked, and the model's name. Raises InputError."""
    is_preset = spec.lower() in model_names()  # whatever files lie in the current folder
    if not is_preset and (spec.endswith(".json") or os.sep in spec or os.path.exists(spec)):
        path = Path(spec)
        if path.suffix == ".py":
            raise InputError(
                f"{spec} is Python code; name the function in it that returns (model, example_inputs), "
                f"such as {spec}:factory"
            )
        path = path / "config.json" if path.is_dir() else path
        return read_config(path), path.parent.name or path.stem, "config"
    preset = model_preset(spec)
    return dict(preset.config), preset.name, "preset"


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"presets and config files need transformers ({error}); pip install 'transformers>=5.4,<6', or name your "
            "own model as package.module:factory"
        ) from None
    return transformers


def _config_object(fields: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """The transformers config of `fields`, and notes on keys that it does not know."""
    transformers = _transformers()
    problems = check_config(fields)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise InputError("the model config cannot be used", problems)
    mapping = transformers.CONFIG_MAPPING
    if model_type not in mapping:
        hint = did_you_mean(model_type, tuple(mapping.keys()), max_listed=0)
        raise InputError(f"transformers has no model_type {model_type!r} and no remote code is run; {hint}")
    config_class = mapping[model_type]
    reported = {problem.path for problem in problems} | {"model_type"}
    usable = {key: value for key, value in cleaned(fields).items() if key not in reported}
    notes, misspelt = _unknown_keys(config_class, usable)
    config, violations = _construct_config(config_class, usable)
    problems += misspelt + violations
    if problems:
        raise InputError(f"the {model_type} config cannot be used", problems)
    config.use_cache = False  # a cache is an output that training has no use for
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0  # without one labels cannot be shifted
    return config, notes


def _construct_config(config_class: Any, fields: dict[str, Any]) -> tuple[Any, list[Problem]]:
    """transformers stops at the first field of a wrong type: drop it and go on, to report them all."""
    problems: list[Problem] = []
    remaining = dict(fields)
    while True:
        try:
            return config_class(**remaining), problems
        except Exception as error:  # whatever a config class raises is about the user's values
            text = " ".join(str(error).split())
            field = re.search(r"[Ff]ield '([^']+)'", text)
            name = field[1] if field else ""
            rule = (text.partition("TypeError: ")[2] or text).partition(" Errors: ")[0]
            rule = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", rule).replace("NoneType", "null")
            problems.append(Problem(path=name, rule=rule[:300], value=None))
            if name not in remaining:
                return None, problems
            del remaining[name]


def _unknown_keys(config_class: Any, fields: Mapping[str, Any]) -> tuple[tuple[str, ...], list[Problem]]:
    """A key nearly equal to a known one that is absent is a misspelling, which transformers would ignore silently."""
    known = set(config_class().to_dict()) | set(config_class.attribute_map) | set(_COMMON_KEYS)
    unknown = [key for key in fields if key not in known and not hasattr(config_class, key)]
    problems, ignored = [], []
    for key in unknown:
        guess = difflib.get_close_matches(key, known - fields.keys(), n=1, cutoff=0.85)
        if guess:
            problems.append(Problem(path=key, rule="is not a known key", suggestion=f"did you mean {guess[0]!r}?"))
        else:
            ignored.append(key)
    note = f"keys that {config_class.__name__} does not know are ignored: {', '.join(ignored)}"
    return ((note,) if ignored else ()), problems


def _multiplies_in_batches(config: Any, dtype_name: str) -> bool:
    """transformers' product of tokens grouped by expert has no float64 kernel."""
    return dtype_name == "float64" and any(hasattr(config, key) for key in ("num_experts", "num_local_experts"))


def _build(config: Any, dtype_name: str, device: str) -> torch.nn.Module:
    import torch

    architecture = (config.architectures or [""])[0]
    library = _transformers()
    fitting = (
        auto
        for end, auto, mapping in _AUTO_CLASSES
        if architecture.endswith(end) and type(config) in getattr(library, mapping)
    )
    auto_name = next(fitting, "AutoModelForCausalLM")
    options: dict[str, Any] = {}
    if _multiplies_in_batches(config, dtype_name):
        options["experts_implementation"] = "batched_mm"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r} is unknown to torch: {error}") from None
    try:
        with target:
            model: torch.nn.Module = getattr(library, auto_name).from_config(
                config, dtype=getattr(torch, dtype_name), trust_remote_code=False, **options
            )
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, ZeroDivisionError, RuntimeError) as error:
        text = " ".join(str(error).split())[:400]
        raise InputError(f"no {auto_name} can be built from the {config.model_type} config: {text}") from error
    return model.train()


# ---- factories ----


def is_factory(spec: str) -> bool:
    """Whether `spec` names a function, which decides its own sizes."""
    module, colon, name = spec.rpartition(":")
    return bool(colon) and os.sep not in name and (module.endswith(".py") or os.sep not in module)


def _from_factory(spec: str, dtype_name: str | None) -> ResolvedModel:
    import torch

    from autopar._torch import private

    factory = _import_factory(spec)
    try:
        returned = factory()
    except Exception as error:
        raise InputError(f"{spec} raised {type(error).__name__}: {error} ({_where(error)})") from error
    expected = "(model, example_inputs): an nn.Module, and a dict of keyword arguments or a tuple of positional ones"
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise InputError(
            f"{spec} must return {expected}, and a loss_fn behind them if the model returns no loss; it returned "
            f"{_kind(returned)}"
        )
    model, inputs, loss_fn = (*returned, None)[:3]
    problems = []
    if loss_fn is not None and not callable(loss_fn):
        problems.append(Problem(path="loss_fn", rule="must be a function of (output, target)", value=_kind(loss_fn)))
    if not isinstance(model, torch.nn.Module):
        problems.append(Problem(path="model", rule="must be a torch.nn.Module", value=_kind(model)))
    if not isinstance(inputs, (dict, tuple)):
        problems.append(Problem(path="example_inputs", rule="must be a dict or a tuple", value=_kind(inputs)))
    elif isinstance(inputs, dict) and not all(isinstance(key, str) for key in inputs):
        problems.append(Problem(path="example_inputs", rule="keys must be names of the forward's arguments"))
    elif not _has_tensor(inputs):
        problems.append(Problem(path="example_inputs", rule="must hold at least one tensor", value=_kind(inputs)))
    if problems:
        raise InputError(f"{spec} must return {expected}", problems)
    model = private.unwrapped(model)
    resolved = ResolvedModel(name=spec, kind="factory", model=model.train(), example_inputs=inputs, loss_fn=loss_fn)
    return resolved if dtype_name is None else in_storage(resolved, getattr(torch, dtype_name))


def in_storage(resolved: ResolvedModel, dtype: torch.dtype) -> ResolvedModel:
    """A model and its inputs with all floating-point tensors as `dtype`, and complex ones with parts of it."""
    from autopar._torch.private import convert_tensors

    model = convert_tensors(resolved.model, lambda t: t.to(like_kind(t.dtype, dtype)))
    return replace(resolved, model=model, example_inputs=_cast(resolved.example_inputs, dtype))


def _has_tensor(value: object) -> bool:
    """Whether nested inputs hold a tensor. A dataclass that torch does not know may hold one; its capture names it."""
    import torch

    from autopar._torch.private import pytree

    return any(isinstance(leaf, torch.Tensor) or is_dataclass(leaf) for leaf in pytree.tree_leaves(value))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Nested inputs with floating-point tensors as `dtype`, and complex ones with parts of it."""
    import torch

    from autopar._torch.private import pytree

    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(like_kind(t.dtype, dtype)), value)


def _import_factory(spec: str) -> Callable[[], object]:
    module_name, _, attribute = spec.rpartition(":")
    file = Path(module_name) if module_name.endswith(".py") else None
    is_name = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module_name) is not None
    if not (file or is_name) or not attribute.isidentifier():
        raise InputError(f"{spec!r} is neither package.module:factory nor path/to/file.py:factory")
    if file is not None and not file.is_file():
        raise InputError(f"there is no file {file}, needed for {spec}")
    # appended, not prepended: a folder of the user's must not shadow an installed package
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name) if file is None else _module_of(file)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            looked = "the current folder and the installed packages were searched"
            raise InputError(f"no module named {error.name!r}, needed for {spec}; {looked}") from None
        raise InputError(f"importing {module_name} failed: {error} ({_where(error)})") from error
    except Exception as error:
        raise InputError(f"importing {module_name} raised {type(error).__name__}: {error} ({_where(error)})") from error
    factory: object = getattr(module, attribute, None)
    if factory is None:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise InputError(f"module {module_name} has no {attribute!r}; {did_you_mean(attribute, public, max_listed=10)}")
    if not callable(factory):
        raise InputError(f"{spec} is {_kind(factory)}, not a function that returns (model, example_inputs)")
    return factory


def _module_of(file: Path) -> ModuleType:
    """The module of a file, loaded once. It can import the modules beside it."""
    name = re.sub(r"\W", "_", str(file.resolve()))
    if name not in sys.modules:
        sys.path.append(str(file.resolve().parent))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None  # of a file that ends in .py
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no source line"


def _kind(value: object) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list, dict)) else ""
    return f"a {type(value).__name__}{size}"


# ---- arguments ----


def checked_dtype(dtype: str | torch.dtype | None) -> str:
    """A dtype's name without ``torch.``. Raises InputError on one that models are not built in."""
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InputError(f"unknown dtype {name!r}; {did_you_mean(name, _DTYPES)}")
    return name
