"""Export of an unmodified module with example inputs to one flat graph of ATen operators.

`torch.export` traces the module. The resulting graph has named parameters, buffers and outputs, and a module path per
node. One output is the loss.
"""

import contextlib
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn

from autopar._torch.private import as_exported, flex_attention_by, pytree, quick_export
from autopar.capture.export.flexible_attention import flexible_attention
from autopar.capture.export.index_lists import ListsAsSlices
from autopar.capture.flat_graph import Flat
from autopar.capture.passes.in_place import needs_decomposition
from autopar.errors import CaptureError

Inputs = Mapping[str, Any] | Sequence[Any]
LossFunction = Callable[[Any, torch.Tensor], torch.Tensor]  # of (output, target), as torch's losses are
TARGET = "target"


class _Outputs(nn.Module):
    """The model with its output reduced to named tensors. Caches and other objects are dropped."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        if self.loss_fn is None:
            return named_outputs(self.model(*args, **kwargs))
        if TARGET in kwargs:
            target = kwargs.pop(TARGET)
        else:
            *args, target = args  # type: ignore[assignment]
        out = self.model(*args, **kwargs)
        return with_loss(out, self.loss_fn(out, target))


def named_outputs(out: Any) -> dict[str, torch.Tensor]:
    """The tensors of a module's output by name: mapping keys, or positions. The loss has the name ``loss``."""
    found = _tensors(out)
    if "loss" not in found:
        scalars = [name for name, v in found.items() if v.dim() == 0 and v.dtype.is_floating_point]
        if len(scalars) == 1:
            found = {"loss" if name == scalars[0] else name: v for name, v in found.items()}
    return found


def _tensors(out: Any) -> dict[str, torch.Tensor]:
    if isinstance(out, Mapping):
        return {str(k): v for k, v in out.items() if isinstance(v, torch.Tensor)}
    leaves = out if isinstance(out, (tuple, list)) else [out]
    return {f"output_{i}": v for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)}


def with_loss(out: Any, loss: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model's output, and the loss. Raises `CaptureError` if the loss is no floating scalar."""
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.dtype.is_floating_point:
        what = f"a {loss.dtype} tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise CaptureError(
            f"loss_fn must return a floating scalar tensor, it returned {what}; reduce it to a sum or mean"
        )
    return {**_tensors(out), "loss": loss}


def check_loss_fn(model: nn.Module, example_inputs: Inputs, loss_fn: LossFunction) -> None:
    """Raise `CaptureError` if a loss function has parameters, or if the target is missing or ambiguous."""
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise CaptureError(
            f"loss_fn {type(loss_fn).__name__} has parameters, which no optimizer would see; make it part of the model"
        )
    args, kwargs = split_inputs(example_inputs)
    signature = inspect.signature(model.forward).parameters
    if kwargs and TARGET in signature:
        raise CaptureError(f"the model has an input {TARGET!r} itself; pass example_inputs as a tuple, its target last")
    if (kwargs and TARGET not in kwargs) or not (args or kwargs):
        raise CaptureError(
            f"loss_fn needs a target: the last element of a tuple, or the key {TARGET!r} beside the model's inputs "
            f"{list(signature)}"
        )
    positional = [p for p in signature.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    if args and len(args) - 1 < len(required):
        raise CaptureError(f"loss_fn needs a target after the model's inputs {required}; {len(args)} values were given")


@contextlib.contextmanager
def _without_cache(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode, without generation caches (`config.use_cache`).

    If the model is in the other mode, all its modules change mode. Otherwise each module keeps its own mode.
    """
    owned: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in owned if getattr(config, "use_cache", None)}
    was_training = {module: module.training for module in model.modules()}
    for config in configs.values():
        config.use_cache = False
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True
        for module, mode in was_training.items():
            module.training = mode


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turn garbage collection off: an export makes millions of live objects, and each collection walks all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def split_inputs(example_inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a call with these inputs."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return tuple(example_inputs), {}


def input_names(
    model: nn.Module, example_inputs: Inputs, loss_fn: LossFunction | None = None
) -> dict[str, torch.Tensor]:
    """The tensor inputs by name: their keywords, or the argument names of `forward` for positional inputs.

    With a `loss_fn`, the last positional input is the target.
    """
    args, kwargs = split_inputs(example_inputs)
    signature = list(inspect.signature(model.forward).parameters)
    own = args[:-1] if loss_fn is not None else args
    named = {signature[i] if i < len(signature) else f"args_{i}": value for i, value in enumerate(own)} | kwargs
    if loss_fn is not None and args:
        named[TARGET if TARGET not in named else "loss_target"] = args[-1]
    found: dict[str, torch.Tensor] = {}
    for name, value in named.items():
        leaves, _ = pytree.tree_flatten(value)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                found[name if len(leaves) == 1 else f"{name}_{i}"] = leaf
    return found


def inputs_of_shapes(
    model: nn.Module, example_inputs: Inputs, sizes: Mapping[str, tuple[int, ...]], loss_fn: LossFunction | None = None
) -> Inputs:
    """The example inputs with every tensor replaced by zeros of the shape given for its name."""
    names = iter(input_names(model, example_inputs, loss_fn))  # in the order of the tensors
    return resize_inputs(example_inputs, lambda _: sizes[next(names)])


def resize_inputs(example_inputs: Inputs, resize: Any) -> Inputs:
    """The example inputs with every tensor replaced by a new tensor of zeros of shape `resize(tensor)`."""

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.zeros(resize(leaf), dtype=leaf.dtype, device=leaf.device)

    leaves, spec = pytree.tree_flatten(example_inputs)
    inputs: Inputs = pytree.tree_unflatten([fresh(leaf) for leaf in leaves], spec)
    return inputs


def _where_it_failed(error: BaseException, model: nn.Module) -> str:
    """The module path and source line of the deepest frame of the user's model in a failed export."""
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


def capture_flat(
    model: nn.Module, example_inputs: Inputs, loss_fn: LossFunction | None = None, *, training: bool = True
) -> Flat:
    """Trace a model in training or evaluation mode at the given input shapes.

    Raises `CaptureError` with the module and source line if the model cannot be exported.
    """
    exported = _exported(model, example_inputs, loss_fn, training)
    placeholders = _placeholders(model, exported, tuple(input_names(model, example_inputs, loss_fn)))
    changeable = {node: name for node, (kind, name) in placeholders.items() if kind in ("buffer", "input")}
    if needs_decomposition(exported.graph_module, changeable):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = exported.run_decompositions({})
        placeholders = _placeholders(model, exported, tuple(input_names(model, example_inputs, loss_fn)))
    module = exported.graph_module
    for node in list(module.graph.nodes):  # inputs other than tensors are constants of the capture
        if node.op == "placeholder" and node.name not in placeholders and not node.users:
            module.graph.erase_node(node)
    lifted = {name: value for name, value in exported.constants.items() if isinstance(value, torch.Tensor)}
    lifted |= {name: value for name, value in exported.state_dict.items() if name.startswith("loss_fn.")}
    for name, value in lifted.items():
        if not hasattr(module, name.replace(".", "_")):
            module.register_buffer(name.replace(".", "_"), value, persistent=False)
    updates = _order_outputs(exported, placeholders)
    names = tuple(str(key) for key in (exported.call_spec.out_spec.context or ()))
    if "loss" not in names:
        raise CaptureError(
            f"the model returns no loss: its outputs are {list(names)}. Return a scalar, name one output 'loss' "
            "(transformers models do when `labels` are among the inputs), or pass loss_fn=..., a function of "
            "(output, target)."
        )
    return Flat(graph=module.graph, placeholders=placeholders, outputs=names, root=module, updates=updates)


def _exported(model: nn.Module, example_inputs: Inputs, loss_fn: LossFunction | None, training: bool) -> Any:
    if loss_fn is not None:
        check_loss_fn(model, example_inputs, loss_fn)
    try:
        return _export(model, example_inputs, loss_fn, training)
    except CaptureError:
        raise
    except Exception as error:
        failed = error
    if all(parameter.is_meta for parameter in model.parameters()):  # meta activations cannot meet inputs on a device
        try:
            return _export(model, _on_meta(example_inputs), loss_fn, training)
        except Exception as error:
            failed = error
    first = str(failed).strip().split("\n")[0][:300]
    raise CaptureError(
        f"the model cannot be captured: {_where_it_failed(failed, model)}: {type(failed).__name__}: {first}\n"
        "Remove data-dependent control flow from this code: use torch.where, or fixed shapes. Give custom operators "
        "a fake kernel (torch.library.register_fake)."
    ) from failed


def run_on_meta(
    model: nn.Module, example_inputs: Inputs, loss_fn: LossFunction | None = None, *, training: bool = True
) -> None:
    """Call a model on meta tensors as an export does. Raises any exception of the model."""
    args, kwargs = split_inputs(_on_meta(example_inputs))
    with _without_cache(model, training), warnings.catch_warnings(), ListsAsSlices(), as_exported(), _no_collection():
        warnings.simplefilter("ignore")
        _Outputs(model, loss_fn)(*args, **kwargs)


def _export(model: nn.Module, example_inputs: Inputs, loss_fn: LossFunction | None, training: bool) -> Any:
    args, kwargs = split_inputs(example_inputs)
    with ExitStack() as stack:
        stack.enter_context(_without_cache(model, training))
        stack.enter_context(warnings.catch_warnings())
        for context in (ListsAsSlices(), quick_export(), _no_collection(), flex_attention_by(flexible_attention)):
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        return torch.export.export(_Outputs(model, loss_fn), args, kwargs, strict=False)


def _on_meta(example_inputs: Inputs) -> Inputs:
    moved: Inputs = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to("meta"), example_inputs)
    return moved


def _placeholders(model: nn.Module, exported: Any, inputs: Sequence[str]) -> dict[str, tuple[str, str]]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first_name = {id(tensor): name for name, tensor in reversed(tensors)}
    canonical = {name: first_name[id(tensor)] for name, tensor in tensors}
    names = iter(inputs)
    found: dict[str, tuple[str, str]] = {}
    for spec in exported.graph_signature.input_specs:
        node_name = getattr(spec.arg, "name", "")
        kind = spec.kind.name
        target = (spec.target or "").removeprefix("model.")
        if kind == "PARAMETER":
            found[node_name] = ("parameter", canonical[target])
        elif kind == "BUFFER" and not target.startswith("loss_fn."):
            found[node_name] = ("buffer", canonical.get(target, target))
        elif kind in ("CONSTANT_TENSOR", "BUFFER"):
            found[node_name] = ("lifted", spec.target or "")
        elif kind == "USER_INPUT" and type(spec.arg).__name__ == "TensorArgument":
            found[node_name] = ("input", next(names))
    return found


def _order_outputs(exported: Any, placeholders: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    """Order a graph's outputs: the model's outputs, then the new values of buffers. Returns the buffers' names.

    In-place changes of inputs are dropped. Raises `CaptureError` if the model changes a parameter.
    """
    graph: fx.Graph = exported.graph_module.graph
    values: Any = graph.output_node().args[0]
    own, updates = [], {}
    for spec, node in zip(exported.graph_signature.output_specs, values, strict=True):
        if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT"):
            own.append(node)
        elif spec.kind.name == "BUFFER_MUTATION" and not str(spec.target).startswith("loss_fn."):
            updates[placeholders[_of_buffer(exported, spec.target)][1]] = node
        elif spec.kind.name != "USER_INPUT_MUTATION":
            raise CaptureError(
                f"the model changes {str(spec.target).removeprefix('model.')} in its forward pass; only buffers of the "
                "model may change there, so make it a buffer or change it outside"
            )
    graph.output_node().args = ((*own, *updates.values()),)
    return tuple(updates)


def _of_buffer(exported: Any, target: str) -> str:
    """The placeholder of a buffer."""
    specs = exported.graph_signature.input_specs
    return next(str(spec.arg.name) for spec in specs if spec.kind.name == "BUFFER" and spec.target == target)
