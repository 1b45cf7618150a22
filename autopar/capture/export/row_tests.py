"""Tests for no rows: ``if mask.any():``, ``if len(rows) == 0: return zero``, ``if not padding.any(): padding = None``.

A trace keeps all rows that data chooses, and a mask. So it takes the branch for some rows. This is right if the branch
gives the same without any row. `difference` tries it: the module runs beside its graph on random weights and inputs,
and every test must find no row in some of these runs. Loss, outputs, buffers and gradients must be equal each time. A
parameter must have a gradient in both or in none, because an optimizer moves a weight whose gradient is zero.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar._torch.private import pytree
from autopar.capture.export.chosen_rows import answer_if_some
from autopar.capture.flat_graph import CHANGED, all_outputs, exported_constants, placeholders_of
from autopar.capture.nodes import SAME_ELEMENTS, before, operator_name
from autopar.capture.state import named_state
from autopar.capture.weightless import with_tensors

_Run = Callable[[nn.Module, Any], Mapping[str, Tensor]]  # a model and its inputs: outputs by name
TEST = "test of rows "  # an output with this prefix is true if the test found a row
_SAME = SAME_ELEMENTS | {"view", "reshape", "squeeze", "unsqueeze", "flatten", "_unsafe_view"}
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_MAX_ELEMENTS, _TRIALS = 2**24, 64  # elements of all parameters; runs of the graph
_SEEN = 16  # runs of the module with the same answers
_LARGEST = 1e3  # parameter; a larger one was never initialised
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-4, torch.complex128: 1e-6, torch.complex64: 3e-4}
_NOT_FOUND = "no random batch without any was found"
_DROPOUTS = ("dropout", "dropout_", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d")


def answer_of(node: fx.Node) -> bool | None:
    """The truth of a value if some element of a mask is true. None unless it tells this from no element."""
    name, source = operator_name(node), node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(source, fx.Node) or node.meta["val"].numel() != 1:
        return None
    if name in ("logical_not", "bitwise_not"):
        inner = answer_of(source)
        return None if inner is None else not inner
    if name in ("any", "all"):  # a test of all elements looks for one that is false
        return name == "any"
    if name in _COMPARED and counted_mask(source) is not None and len(node.args) > 1:
        return answer_if_some(name, node.args[1])
    inner = answer_of(source) if name in _SAME else None
    return True if inner is None and counted_mask(node) is not None else inner


def counted_mask(node: fx.Node) -> fx.Node | None:
    """The mask whose true elements a value counts."""
    node = before_views(node)
    if node.op != "call_function" or node.meta["val"].numel() != 1 or not node.args:
        return None
    mask = before_views(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    is_count = mask is not None and operator_name(node) in ("sum", "count_nonzero")
    return mask if is_count and mask is not None and mask.meta["val"].dtype is torch.bool else None


def tested_mask(node: fx.Node) -> fx.Node | None:
    """The mask whose true elements a test looks for. None for a test of all elements."""
    while (mask := counted_mask(node)) is None and node.args and isinstance(node.args[0], fx.Node):
        if operator_name(node) == "any":
            return node.args[0]
        node = node.args[0]
    return mask


def before_views(node: fx.Node) -> fx.Node:
    """The value before views, copies and casts."""
    return before(node, _SAME)


def difference(model: nn.Module, inputs: Any, names: Sequence[str], exported: Any, run: _Run) -> str | None:
    """What differs from a model if the tests of its export find no row. None if nothing does. `names` are of inputs."""
    if sum(parameter.numel() for parameter in model.parameters()) > _MAX_ELEMENTS:
        return "the model is too large to try it without any"
    reason: str | None = _NOT_FOUND
    before = torch.get_default_dtype()
    for is_wide in (True, False):  # some code needs its own dtype
        widened = _wide if is_wide else lambda value: value
        constants = {("lifted", name): widened(value) for name, value in exported_constants(exported).items()}
        try:
            torch.set_default_dtype(torch.float64 if is_wide else before)
            copied = _copied(model).double() if is_wide else _copied(model)
            traced = partial(_traced, copied, names, exported, constants)
            reason = _difference(copied, pytree.tree_map(widened, inputs), traced, run, is_wide)
        except Exception as error:  # a user's attribute may raise anything
            reason = f"a copy of the model fails with {type(error).__name__}"
        finally:
            torch.set_default_dtype(before)
        if reason != _NOT_FOUND:
            break
    return reason


def _wide(value: Any) -> Any:
    """A tensor or a dtype in float64, if it is floating."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _difference(
    copied: nn.Module, inputs: Any, traced: Callable[[Any, int], Mapping[str, Tensor]], run: _Run, is_wide: bool
) -> str | None:
    seen = Counter[tuple[bool, ...]]()  # batches by the answers of all tests: they may depend on each other
    state = {name: tensor.detach().clone() for _, name, tensor in named_state(copied)}
    with torch.random.fork_rng(devices=()), _NoDropout(is_wide), torch.enable_grad():
        for trial in range(_TRIALS):
            torch.manual_seed(trial)
            _draw(copied, state, trial)
            given = _drawn(inputs, trial)
            with suppress(Exception):  # a batch that the model does not take
                results = traced(given, trial)
                answers = tuple(bool(value.any()) for name, value in results.items() if name.startswith(TEST))
                if seen[answers] < _SEEN and (why := _differs(copied, given, results, run, trial)):
                    return f"without any, {why}"
                if results["loss"].isfinite():  # else any branch is equal
                    seen[answers] += 1
    without = (not all(answers) for answers in zip(*seen, strict=True))  # with some, the graph is the branch
    return None if seen and all(without) else _NOT_FOUND


def _traced(
    model: nn.Module,
    names: Sequence[str],
    exported: Any,
    constants: Mapping[tuple[str, str], Tensor],
    inputs: Any,
    seed: int,
) -> dict[str, Tensor]:
    """The outputs of an export by name. Changed buffers have a prefix."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    values: dict[tuple[str, str], Tensor] = {("input", name): x for name, x in zip(names, leaves, strict=True)}
    values |= {(kind, name): tensor for kind, name, tensor in named_state(model)} | dict(constants)
    placeholders = placeholders_of(model, exported, names)
    given = [
        values[placeholders[node.name]].clone() if node.name in placeholders else None
        for node in exported.graph_module.graph.find_nodes(op="placeholder")
    ]
    torch.manual_seed(seed)
    results = fx.Interpreter(exported.graph_module).run(*given)
    return dict(zip(all_outputs(exported, placeholders), results, strict=True))


def _differs(model: nn.Module, inputs: Any, traced: Mapping[str, Tensor], run: _Run, seed: int) -> str:
    """What differs between a graph and its model in one batch. Empty if nothing does."""
    torch.manual_seed(seed)
    try:
        results = dict(run(model, pytree.tree_map_only(torch.Tensor, torch.clone, inputs)))
    except ZeroDivisionError:  # the model ends here, as with ``total / count`` without any
        return ""
    if not bool(results["loss"].isfinite()):
        return "the loss is another value" if bool(traced["loss"].isfinite()) else ""
    changed = {name: b.detach() for name, b in model.named_buffers(remove_duplicate=False)}
    results |= {name: changed[name.removeprefix(CHANGED)] for name in traced if name.startswith(CHANGED)}
    for name, value in results.items():
        if name in traced and not _alike(traced[name], value):
            return f"{name!r} is another value"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    pairs = [_gradients(loss, trained) for loss in (traced["loss"], results["loss"])]
    largest = max((float(g.abs().max()) for g in pairs[1].values() if g is not None and g.numel()), default=0.0)
    for name in trained:
        ours, theirs = (gradients[name] for gradients in pairs)
        if theirs is None and ours is not None:
            return f"{name!r} has no gradient, so that an optimizer leaves it alone; leave out the test if it may move"
        if theirs is not None and not _alike(torch.zeros_like(theirs) if ours is None else ours, theirs, largest):
            return f"{name!r} has another gradient"
    return ""


def _gradients(loss: Tensor, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    if not loss.requires_grad:
        return dict.fromkeys(trained)
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True), strict=True))


def _alike(actual: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
    if actual.shape != expected.shape:
        return False
    tolerance = _TOLERANCE.get(expected.dtype, 0.05 if expected.dtype.is_floating_point else 0.0)
    actual, expected = actual.detach().to(expected.dtype), expected.detach()
    largest = max(scale, float(expected.abs().nan_to_num().max())) if expected.numel() and tolerance else 0.0
    return torch.allclose(actual, expected, tolerance, tolerance * largest, equal_nan=True)


def _copied(model: nn.Module) -> nn.Module:
    """A copy with values. Tensors on meta get values of their own."""
    return with_tensors(model, lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t.detach().clone())


@torch.no_grad()
def _draw(model: nn.Module, state: Mapping[str, Tensor], trial: int) -> None:
    """Other parameters, some large, so that a router prefers few rows. Numbers never initialised count as zeros."""
    for _, name, tensor in named_state(model):
        tensor.copy_(state[name])
        if isinstance(tensor, nn.Parameter) and tensor.dtype.is_floating_point:
            tensor.masked_fill_(~(tensor.abs() < _LARGEST), 0.0)
            factor, noise = ((1.0, 3.0, 0.3)[trial % 3], (0.1, 1.0)[trial % 2]) if trial else (1.0, 0.0)
            tensor.mul_(factor).add_(torch.randn_like(tensor), alpha=noise)


def _drawn(inputs: Any, trial: int) -> Any:
    """Inputs whose elements are those of the example: mixed, of few kinds, or in equal rows. Some are other numbers."""

    def draw(x: Tensor) -> Tensor:
        flat = x.flatten()
        if not trial or not len(flat):
            return x.clone()
        kind, mixed = int(torch.randint(5, ())), flat[torch.randint(len(flat), flat.shape)]
        if kind == 0 and x.dtype is not torch.bool:
            last = 0 if x.dtype.is_floating_point else int(flat.max())
            integers = torch.arange(len(flat)), mixed - last - 1, torch.randint(last + 8, flat.shape)
            new = torch.randn(flat.shape) if x.dtype.is_floating_point else integers[trial % 3]
            return new.to(flat).reshape(x.shape)
        if kind == 1 and x.dim():
            return x[torch.randint(len(x), (1,))].expand(x.shape).clone()
        if kind == 2 and x.dtype is torch.bool:
            return ~x
        few = mixed[: (1, 2, len(flat))[trial % 3]]
        return few[torch.randint(len(few), flat.shape)].reshape(x.shape)

    return pytree.tree_map_only(torch.Tensor, draw, inputs)


class _NoDropout(TorchFunctionMode):
    """Functions of a model, and operators of a graph, run without dropout, perhaps in float64."""

    def __init__(self, is_wide: bool) -> None:
        super().__init__()
        self._is_wide = is_wide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        if self._is_wide:
            args, kwargs = pytree.tree_map(_wide, (args, kwargs))
            func = Tensor.double if func in (Tensor.float, Tensor.half, Tensor.bfloat16) else func
        if name in _DROPOUTS and args:
            return args[0]
        if name == "scaled_dot_product_attention":
            named = kwargs | {"dropout_p": 0.0}
            args, kwargs = ((*args[:4], 0.0, *args[5:]), kwargs) if len(args) > 4 else (args, named)
        return func(*args, **kwargs)
