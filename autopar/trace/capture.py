"""Capture: an unmodified module and example inputs to one flat graph of functional ATen operators.

`torch.export` does the tracing. What comes out has named parameters and buffers, one `TensorInfo` per node, the
loss first among its outputs, and a module path per node.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from autopar.errors import CaptureError
from autopar.ir.program import PartOf
from autopar.trace._torch_private import pytree
from autopar.trace.index_lists import ListsAsSlices

Inputs = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Flat:
    """A captured graph before normalisation. `placeholders` maps node names to ("parameter"|"buffer"|"input", name).

    `parts` says of names that are pieces of a parameter which (`autopar.trace.packings`).
    """

    graph: fx.Graph
    placeholders: dict[str, tuple[str, str]]
    outputs: tuple[str, ...]
    root: fx.GraphModule
    parts: dict[str, PartOf] = field(default_factory=dict)


class _Outputs(nn.Module):
    """The model with its output reduced to named tensors, so that caches and other objects do not matter."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return named_outputs(self.model(*args, **kwargs))


def named_outputs(out: Any) -> dict[str, torch.Tensor]:
    """Tensors of a module's output by name: mapping keys, or positions; the loss is called ``loss``."""
    if isinstance(out, Mapping):
        found = {str(k): v for k, v in out.items() if isinstance(v, torch.Tensor)}
    else:
        leaves = out if isinstance(out, (tuple, list)) else [out]
        found = {f"output_{i}": v for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)}
    if "loss" not in found:
        scalars = [name for name, v in found.items() if v.dim() == 0 and v.dtype.is_floating_point]
        if len(scalars) == 1:
            found = {"loss" if name == scalars[0] else name: v for name, v in found.items()}
    return found


@contextlib.contextmanager
def _training_without_cache(model: nn.Module) -> Iterator[None]:
    """Generation caches are no part of training; modules that have the switch (`config.use_cache`) have it off."""
    owned: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in owned if getattr(config, "use_cache", None)}
    was_training = [m for m in model.modules() if not m.training]
    for config in configs.values():
        config.use_cache = False
    model.train()
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True
        for module in was_training:
            module.training = False


def split_inputs(example_inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call with these inputs."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return tuple(example_inputs), {}


def input_names(model: nn.Module, example_inputs: Inputs) -> dict[str, torch.Tensor]:
    """Tensor inputs by name: keywords, or the parameter names of `forward` for positional ones."""
    args, kwargs = split_inputs(example_inputs)
    signature = list(inspect.signature(model.forward).parameters)
    named = {signature[i] if i < len(signature) else f"args_{i}": value for i, value in enumerate(args)} | kwargs
    found: dict[str, torch.Tensor] = {}
    for name, value in named.items():
        leaves, _ = pytree.tree_flatten(value)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                found[name if len(leaves) == 1 else f"{name}_{i}"] = leaf
    return found


def resize_inputs(example_inputs: Inputs, resize: Any) -> Inputs:
    """Example inputs with every tensor replaced by a distinct empty one of shape `resize(tensor)`."""

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.zeros(resize(leaf), dtype=leaf.dtype, device=leaf.device)

    leaves, spec = pytree.tree_flatten(example_inputs)
    inputs: Inputs = pytree.tree_unflatten([fresh(leaf) for leaf in leaves], spec)
    return inputs


def _where_it_failed(error: BaseException, model: nn.Module) -> str:
    """Module path and source line of the deepest frame of the user's model in a failed export."""
    paths = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    seen: BaseException | None = error
    best = ""
    while seen is not None:
        trace = seen.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if id(owner) in paths:
                code = trace.tb_frame.f_code
                best = f"module {paths[id(owner)]!r} ({type(owner).__name__}), {code.co_filename}:{trace.tb_lineno}"
            trace = trace.tb_next
        seen = seen.__cause__ or seen.__context__
    return best or f"module {type(model).__name__}"


def capture_flat(model: nn.Module, example_inputs: Inputs) -> Flat:
    """Trace a model in training mode at the given input shapes.

    Raises `CaptureError`, naming module and source line, where the model cannot be exported.
    """
    args, kwargs = split_inputs(example_inputs)
    wrapper = _Outputs(model)
    with _training_without_cache(model), warnings.catch_warnings(), ListsAsSlices():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(wrapper, args, kwargs, strict=False)
        except Exception as error:
            first = str(error).strip().split("\n")[0][:300]
            raise CaptureError(
                f"the model cannot be captured: {_where_it_failed(error, model)}: {type(error).__name__}: {first}\n"
                "Make this code free of data-dependent control flow (use torch.where, or fixed shapes), and give "
                "custom operators a fake kernel (torch.library.register_fake)."
            ) from error
    signature = exported.graph_signature
    first_name = {id(p): n for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    canonical = {n: first_name[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    names = iter(input_names(model, example_inputs))
    placeholders: dict[str, tuple[str, str]] = {}
    for spec in signature.input_specs:
        node_name = getattr(spec.arg, "name", "")
        kind = spec.kind.name
        target = (spec.target or "").removeprefix("model.")
        if kind == "PARAMETER":
            placeholders[node_name] = ("parameter", canonical[target])
        elif kind == "BUFFER":
            placeholders[node_name] = ("buffer", target)
        elif kind == "CONSTANT_TENSOR":
            placeholders[node_name] = ("lifted", spec.target or "")
        elif kind == "USER_INPUT" and type(spec.arg).__name__ == "TensorArgument":
            placeholders[node_name] = ("input", next(names))
    module = exported.graph_module
    for name, value in exported.constants.items():
        if isinstance(value, torch.Tensor) and not hasattr(module, name.replace(".", "_")):
            module.register_buffer(name.replace(".", "_"), value, persistent=False)
    outputs = _output_names(model, exported, example_inputs)
    return Flat(graph=module.graph, placeholders=placeholders, outputs=outputs, root=module)


def _output_names(model: nn.Module, exported: Any, example_inputs: Inputs) -> tuple[str, ...]:
    """Names of the outputs in graph order, read from the output tree of `_Outputs` (a flat dict)."""
    context = exported.call_spec.out_spec
    names = tuple(str(key) for key in (context.context or ()))
    mutated = [s for s in exported.graph_signature.output_specs if s.kind.name not in ("USER_OUTPUT", "LOSS_OUTPUT")]
    if mutated:
        raise CaptureError(
            f"the model changes {sorted({str(s.target) for s in mutated})} in its forward pass (batch-norm statistics, "
            "counters); buffers changed in forward are not supported yet. Freeze them (eval mode for those modules)."
        )
    if "loss" not in names:
        raise CaptureError(
            f"the model returns no loss: its outputs are {list(names)}. Return a scalar, name one output 'loss' "
            "(transformers models do when `labels` are among the inputs), or wrap model and loss in one module."
        )
    return names
