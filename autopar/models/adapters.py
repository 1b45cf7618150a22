"""A model that trains some of its parameters: adapters of `peft` beside frozen layers, or all but some modules."""

from collections.abc import Callable, Iterable

from torch import nn

from autopar.errors import InputError, did_you_mean
from autopar.ir.trained import TrainedParameters


def with_trained(model: nn.Module, trained: TrainedParameters) -> nn.Module:
    """Change a model in place, so that it trains what `trained` says, and return it.

    Args:
        model: A module, on meta or with weights. Adapters get names as `peft` gives them.
        trained: The parameters to train (`autopar.ir.trained.trained_from`).

    Returns:
        The model.

    Raises:
        InputError: A module is unknown or no linear layer, weights are quantised, or `peft` is not installed.

    Example:
        >>> from torch import nn
        >>> from autopar.ir.trained import trained_from
        >>> model = with_trained(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), trained_from("frozen:0"))
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias']
    """
    if trained.kind == "frozen":
        for module in _named(model, trained.modules, "frozen").values():
            module.requires_grad_(False)
    if trained.kind == "qlora":
        raise InputError("--trains qlora: autopar prices published runs with 4-bit weights, and trains none; use lora")
    if not trained.has_adapters:
        return model
    targets = _named(model, trained.targets, "targets", _is_linear) if trained.targets else _linear_layers(model)
    also = _named(model, trained.also, "also")
    try:
        import peft
    except ImportError as error:
        raise InputError(f"adapters need peft ({error}); pip install 'peft>=0.21,<1'") from None
    config = peft.LoraConfig(
        r=trained.rank, lora_alpha=trained.alpha, target_modules=list(targets), lora_dropout=0.0, bias="none"
    )
    peft.inject_adapter_in_model(config, model)
    for module in also.values():
        module.requires_grad_(True)
    return model


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All linear layers but the head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = {name: m for name, m in model.named_modules() if _is_linear(m) and m is not head}
    if not layers:
        raise InputError("the model has no linear layer for adapters; name modules with --trains lora:targets=...")
    return layers


def _is_linear(module: nn.Module) -> bool:
    """A layer that `peft` has adapters for: torch's, or the one of transformers' GPT-2."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _named(
    model: nn.Module, names: Iterable[str], word: str, is_kind: Callable[[nn.Module], bool] | None = None
) -> dict[str, nn.Module]:
    """The modules whose paths end with these names. Each name must have a module of the kind, if one is given."""
    modules = {path: m for path, m in model.named_modules() if path and (is_kind is None or is_kind(m))}
    named = dict[str, nn.Module]()
    for name in names:
        of_name = {path: m for path, m in modules.items() if path == name or path.endswith(f".{name}")}
        if not of_name:
            known = tuple(dict.fromkeys(path.rpartition(".")[2] for path in modules))
            what = "module" if is_kind is None else "linear layer"
            raise InputError(f"--trains {word}: the model has no {what} {name!r}; {did_you_mean(name, known)}")
        named |= of_name
    return named
