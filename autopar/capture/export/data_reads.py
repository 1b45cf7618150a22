"""Reads of a tensor's value while a model is traced: ``if mask.any()``, ``lengths.max().item()``, ``x.numpy()``.

A trace has no values. A value that depends on no parameter and no random number is computed (`known_values`), and the
model reads it. If an input decides the value, only ``specialise=True`` permits the read. A value that an input or a
buffer decides becomes a `Decision`, an output of the graph that later batches are compared with. A model that looks
for overflows reads that there are none, which is a note of the program. Every other read is refused, with the line of
the model.
"""

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar._torch import exports
from autopar._torch.private import pytree
from autopar.capture.export.assertions import check_that_reads
from autopar.capture.export.chosen_rows import (
    DIVISIONS,
    ChosenRows,
    Count,
    choose,
    chosen_of,
    same_value,
)
from autopar.capture.export.chosen_rows import run_with_chosen as on_rows
from autopar.capture.export.data_sizes import known_sizes
from autopar.capture.export.index_lists import as_slices
from autopar.capture.export.inner_gradients import NotRecorded, gradient
from autopar.capture.export.known_values import RANDOM_NUMBERS, Known, KnownValues, Unknown, leaf, written_by
from autopar.capture.export.row_tests import answer_of, before_views, counted_mask, tested_mask
from autopar.capture.export.source_lines import line_that_runs, refusal
from autopar.capture.nodes import operator_name
from autopar.capture.request import Reading
from autopar.errors import CaptureError, short_repr
from autopar.ir.program import Decision

_AS_NUMBERS: Mapping[Any, Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__complex__: complex,
    Tensor.__index__: operator.index,
    Tensor.is_nonzero: bool,
    torch.is_nonzero: bool,
    Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
}
_AS_ARRAYS = (Tensor.numpy, Tensor.__array__)
# functions of tensors that return a number: the tensor whose truth they return
_AS_TRUTH: Mapping[Any, Callable[..., Tensor | bool]] = {
    **dict.fromkeys((torch.equal, Tensor.equal), lambda a, b: _is_one(a, b) or (a.shape == b.shape and (a == b).all())),
    **dict.fromkeys((torch.allclose, Tensor.allclose), lambda *args, **kwargs: torch.isclose(*args, **kwargs).all()),
    Tensor.__contains__: lambda a, element: (a == element).any(),
}
# a function in Python asks whether a mode takes it over, and would then hide its reads from the mode
_ASKED = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
_ANSWERS: dict[str, Any] = dict.fromkeys(_ASKED, lambda *_: False)
_ANSWERS["overrides"] = SimpleNamespace(**_ANSWERS)
_REQUIRES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
REMEDY = "use torch.where, or fixed shapes, at this line"
_SHAPE = "makes a tensor whose shape depends on data"
_ROWS = (
    ", such as zeros for rows that count for nothing (for a loop over experts see docs/experts.md), or "
    "index[..., None] == torch.arange(n) for a one-hot"
)
_NUMBER_OF_ROWS = (
    "needs the number or the order of rows that data chooses; count with tensors, such as mask.sum(), and write zeros "
    "for rows that count for nothing (for a loop over experts see docs/experts.md)"
)
_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_NAMES = "arange empty eye full linspace ones rand randint randn randperm tril_indices triu_indices zeros"
_MAKERS = frozenset(getattr(torch, name) for name in _NAMES.split())
_SPECIALISED = ", or pass specialise=True: a batch with another value is then captured again"
_UNCHANGED = (
    "do this outside of forward, between two steps, or turn it off in the configuration (such as "
    f"feature_redraw_interval=None); otherwise {REMEDY}"
)
_CHANCE = "or turn this draw off in the configuration, such as layerdrop=0"


class DataReads(TorchFunctionMode):
    """Gives a traced model the values that it reads of tensors by name and kind, or refuses; `decided` notes them."""

    def __init__(self, model: nn.Module, given: Iterable[tuple[str, str, Tensor, Tensor]], reading: Reading) -> None:
        super().__init__()
        self._model, self._reading = model, reading
        # now: `x.to(device)` may return `x`, whose node is then another
        given = list(given)
        self._given = [(exports.traced_node(traced), name, kind, value) for name, kind, traced, value in given]
        # a module may hold its own parameters in a list, where an export does not find them
        pairs = [(traced, value) for _, kind, traced, value in given if kind != "input"]
        self._traced = {id(value): traced for traced, value in pairs if value is not traced}
        # the nodes that require gradients, and the last node before they did
        self._leaves = {
            n: n for n, _, kind, t in self._given if kind == "parameter" and n is not None and t.requires_grad
        }
        self.decided: list[tuple[Decision, Tensor]] = []
        self.notes: dict[str, None] = {}
        self.tests: list[Tensor] = []  # of tests for no rows: whether there is one
        self._tested: list[fx.Node] = []  # the masks of these tests
        self._entered: list[Any] = []
        self._rows: dict[fx.Node, Exception] = {}  # chosen rows, with the error of code that takes them unseen
        self._of_rows: set[fx.Node] = set()  # operators that functions of chosen rows have called
        self._occurrences: Counter[str] = Counter()
        self._devices = {value.device.type for *_, value in self._given}
        self._is_on_meta = {value.is_meta for _, _, kind, value in self._given if kind == "parameter"} == {True}
        self._values: KnownValues | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            args = args[0], as_slices(*args)
        if any(id(leaf) in self._traced for leaf in pytree.tree_leaves((args, kwargs))):
            args, kwargs = pytree.tree_map_only(Tensor, lambda t: self._traced.get(id(t), t), (args, kwargs))
        chosen = next(chosen_of((args, kwargs)), None)
        if chosen is not None:
            return self._known(exports.last_node(chosen.flat), on_rows(func, args, kwargs), chosen)
        if (rows := choose(func, args, kwargs, self)) is not NotImplemented:
            line = line_that_runs(self._model)
            self.notes[f"{line}: `{line.code}` keeps all rows, and what it does not choose is computed too"] = None
            return self._known(None, rows, next(chosen_of(rows)))
        if func in _AS_NUMBERS:
            return self._read(args[0], _AS_NUMBERS[func], lambda: func(*args, **kwargs))
        if func in _AS_ARRAYS:
            return self._array(args[0], func.__name__)
        if func in _AS_TRUTH:
            truth = _AS_TRUTH[func](*args, **kwargs)
            return self._read(truth, bool, lambda: bool(truth)) if isinstance(truth, Tensor) else truth
        if func is Tensor.__format__ or func is Tensor.__repr__:
            return f"<tensor of shape {tuple(args[0].shape)}>"
        if func in _REQUIRES and all(args[1:]) and (node := exports.traced_node(args[0])) is not None:
            self._leaves[node] = next(reversed(node.graph.nodes))
        if func is Tensor.detach_ or (func in _REQUIRES and not all(args[1:])):
            self._check_trained(args[0])
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            return self._set_data(*args)
        if func in _OF_DATA and any(map(exports.traced_node, filter(torch.is_tensor, pytree.tree_leaves(args[0])))):
            is_kept = func is not torch.tensor and isinstance(args[0], Tensor)  # its gradient flows
            stacked = args[0] if is_kept else _stacked(args[0])
            return stacked.to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
        if func in (Tensor.backward, torch.autograd.backward):
            raise refusal(
                self._model,
                "writes gradients in the forward pass; use torch.autograd.grad(..., create_graph=True), which returns "
                "them",
            )
        if func is torch.autograd.grad:
            return self._gradient(args, kwargs)
        self._check_device(func, args, kwargs)
        if self._is_on_meta and kwargs.get("device") is None:  # the model's device stands for any
            if func in _MAKERS:
                kwargs = {**kwargs, "device": "meta"}
            elif func in _OF_DATA:
                return func(*args, **kwargs).to("meta")
        if getattr(func, "__name__", "").strip("_") in DIVISIONS and self._tested and isinstance(args[1], Tensor):
            args = (args[0], self._divisor(args[1]), *args[2:])
        result = known_sizes(func, args, kwargs, self._size)
        if result is NotImplemented:
            result = self._inside(func)(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(size, int) for r in results if isinstance(r, Tensor) for size in r.shape):
            raise self._refusal(_SHAPE, _ROWS)
        return result

    def _inside(self, func: Any) -> Any:
        """A function of torch that is written in Python, so that its own reads come here too."""
        if not isinstance(func, FunctionType) or func in self._entered or not _ASKED & {*func.__code__.co_names}:
            return func
        names = func.__globals__ | _ANSWERS
        copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
        copy.__kwdefaults__ = func.__kwdefaults__

        def run(*args: Any, **kwargs: Any) -> Any:
            self._entered.append(func)
            try:
                with self:
                    return copy(*args, **kwargs)
            finally:
                self._entered.pop()

        return run

    def _known(self, last: fx.Node | None, result: Any, chosen: ChosenRows) -> Any:
        """The result of a function of chosen rows. The nodes behind `last` belong to it."""
        while last is not None and last.next.op != "root":
            last = last.next
            self._of_rows.add(last)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and hasattr(leaf, "chosen")]
        self._rows |= {node: chosen.refusal() for t in tensors if (node := exports.traced_node(t)) is not None}
        return result

    def check_rows(self) -> None:
        """Raise `CaptureError` if code that this mode did not see took chosen rows."""
        for node, error in self._rows.items():
            if not self._of_rows.issuperset(node.users):
                raise error

    def constant(self, tensor: Tensor) -> Tensor | None:
        """The value of a constant."""
        known = self._of_traced(tensor)
        return known.value if isinstance(known, Known) and not known.inputs and not known.buffers else None

    def is_fixed(self, mask: Tensor) -> bool:
        """Whether a mask has one number of true elements, or the number that the example inputs have is captured."""
        known = self._of_traced(mask)
        return known is None or (isinstance(known, Known) and (self._reading.specialise or not known.inputs))

    def refused_rows(self, chosen: ChosenRows) -> CaptureError:
        """The error of code that needs the number of rows that data chooses."""
        is_known = isinstance(self._of_traced(chosen.mask), Known)
        more, option = (_SPECIALISED, "specialise") if is_known else ("", "")
        return self._refusal(_NUMBER_OF_ROWS, more, option)

    def _size(self, tensor: Tensor) -> int:
        """A size of a tensor that the model makes."""
        return int(self._read(tensor, int, lambda: int(tensor), is_size=True))

    def _read(
        self, tensor: Tensor, read: Callable[[Tensor], Any], otherwise: Callable[[], Any], *, is_size: bool = False
    ) -> Any:
        """What the model reads of a tensor."""
        node = exports.traced_node(tensor)
        if node is None:  # a tensor of no graph has a value
            return otherwise()
        check = None if is_size else check_that_reads()
        if check is not None and check.is_number and read is Tensor.item:
            return tensor  # the check reads the truth of a comparison with it
        line, known = line_that_runs(self._model), self._of(node)
        if check is None and not is_size and (assumed := self._assumed(node, tensor, read, known)) is not None:
            return assumed
        key = str(line), self._occurrences[str(line)]
        answers = self._reading.answers or {}
        if isinstance(known, Known):
            with exports.without_tracing():
                value = read(known.value)
            inputs, buffers = known.inputs, known.buffers
            value = self._reading.decided[key].value if key in self._reading.decided else value
            if known.assumes_finite:
                self.notes[f"{line}: `{line.code}` is captured for values without overflow"] = None
            if inputs and self._reading.answers is not None and not (is_size and self._reading.own_sizes):
                if key not in answers:
                    raise self._refusal("reads a value that was not read at the sizes of the plan")
                value = answers[key].value
        elif key in answers:
            value = answers[key].value
            inputs, buffers = frozenset(answers[key].inputs), frozenset(answers[key].buffers)
        elif check is not None and check.passes is not None and (read is bool or tensor.dtype is torch.bool):
            self.notes[f"{line}: `{line.code}` is not checked, because it depends on {known.reason}"] = None
            return check.passes
        else:
            reads = f"{_SHAPE}, and the data depends on" if is_size else "reads a value that depends on"
            more = f", {_CHANCE}" if known.reason == RANDOM_NUMBERS else _ROWS * is_size
            raise self._refusal(f"{reads} {known.reason}", more)
        if inputs and not self._reading.specialise and (check is None or not isinstance(value, bool)):
            names = " and ".join(map(repr, sorted(inputs)))
            reads = f"{_SHAPE}: the size {value}" if is_size else f"reads {short_repr(value)}"
            raise self._refusal(f"{reads}, which is computed of input {names}", _SPECIALISED, option="specialise")
        if inputs or buffers:
            self._occurrences[str(line)] += 1
            decision = Decision(
                name="",
                value=value,
                line=key[0],
                code=line.code,
                occurrence=key[1],
                inputs=tuple(sorted(inputs)),
                buffers=tuple(sorted(buffers)),
            )
            # a value of its own, which is no input: every rank holds it whole
            self.decided.append((decision, tensor.detach().clone().unsqueeze(0)))
        return value

    def _assumed(self, node: fx.Node, tensor: Tensor, read: Any, known: Known | Unknown) -> bool | Count | None:
        """The answer of a test for no rows, if there are some, or their number. None if nothing is assumed."""
        is_known = isinstance(known, Known) and (self._reading.specialise or not known.inputs)
        if is_known or not self._reading.assumes or read not in (bool, Tensor.item):
            return None
        answer = answer_of(node) if read is bool or tensor.dtype is torch.bool else None
        if answer is not None:
            return self.test((tensor != 0) == answer, answer, tested_mask(node))
        mask = counted_mask(node)
        if mask is None or any(mask in written_by(user) for user in mask.users):
            return None
        return Count(ChosenRows(exports.tensor_of(mask), self), 1)

    def is_tested(self, mask: fx.Node | None) -> bool:
        """Whether the code asked if a mask is true anywhere, and ran on."""
        return mask is not None and any(same_value(before_views(mask), before_views(tested)) for tested in self._tested)

    def _divisor(self, number: Tensor) -> Tensor:
        """A divisor. Behind a test for no rows, their number is one instead of none."""
        node = exports.traced_node(number)
        mask = None if node is None else counted_mask(node)
        return number.clamp(min=1) if self.is_tested(mask) else number

    def test(self, some: Tensor, answer: bool, mask: fx.Node | None, chosen: ChosenRows | None = None) -> bool:
        """The answer of a test for no rows: there are some."""
        check, line = check_that_reads(), line_that_runs(self._model)
        if check is not None and check.passes is not None:
            self.notes[f"{line}: `{line.code}` is not checked, because it depends on rows that data chooses"] = None
            return check.passes
        if chosen is not None and not self._reading.assumes:
            raise chosen.refusal()
        self.notes[f"{line}: `{line.code}` takes the branch for some rows, which is right without any"] = None
        self._tested += [] if mask is None else [mask]
        self.tests.append(some.detach().clone().reshape(1))
        return answer

    def _array(self, tensor: Tensor, name: str) -> Any:
        """The array of a constant."""
        known = self._of_traced(tensor)
        if known is None or isinstance(known, Unknown) or known.inputs:
            raise CaptureError(
                f"the model cannot be captured: {line_that_runs(self._model)}: .{name}() leaves torch, and no gradient "
                "and no other rank can follow; use operators of torch at this line"
            )
        with exports.without_tracing():
            return known.value.clone().numpy()

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Refuse other values for a tensor. A tensor may get its own, such as after a conversion to its own dtype."""
        node, end = exports.traced_node(value), exports.traced_node(tensor)
        while node is not None and node is not end and operator_name(node) in ("detach", "alias", "to"):
            node = node.all_input_nodes[0]
        if node is None or node is not end or value.dtype != tensor.dtype:
            what = "gives a tensor other data; copy it into a buffer with copy_, or use a tensor of another name"
            raise refusal(self._model, what)

    def _check_trained(self, tensor: Tensor) -> None:
        """Refuse to end the training of a parameter in forward."""
        parameters = [n for n, _, kind, value in self._given if kind == "parameter" and value.requires_grad]
        if exports.traced_node(tensor) in parameters:
            remedy = "use detach(), which gives another tensor, or requires_grad_(False) outside of forward"
            raise refusal(self._model, f"ends the training of a parameter in forward; {remedy}")

    def _gradient(self, args: Any, kwargs: Any) -> Any:
        """The gradient of a call of `torch.autograd.grad`."""
        try:
            return gradient(inspect.signature(torch.autograd.grad).bind(*args, **kwargs).arguments, self._leaves)
        except NotRecorded as error:
            raise refusal(self._model, f"computes a gradient, but {error}") from error

    def _of_traced(self, tensor: Tensor) -> Known | Unknown | None:
        """The value of a tensor of the traced graph. None for another one."""
        node = exports.traced_node(tensor)
        return None if node is None else self._of(node)

    def _of(self, node: fx.Node) -> Known | Unknown:
        if self._values is None:
            held = self._reading.buffers
            leaves = {node: leaf(name, k, value, held) for node, name, k, value in self._given if node is not None}
            self._values = KnownValues(leaves)
        return self._values.of(node)

    def _refusal(self, what: str, more: str = "", option: str = "") -> CaptureError:
        """The error of a read. `more` are other remedies. `option` is the argument of a call that permits it."""
        return refusal(self._model, f"{what}; {REMEDY}{more}", option)

    def _check_device(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Refuse a tensor on a device that the model is not on. Torch may end the process for such a tensor."""
        given = (*args[1:], *kwargs.values()) if func is Tensor.to else (kwargs.get("device"),)
        device = "cuda" if func is Tensor.cuda else next(filter(None, map(_type_of, given)), None)
        if device is not None and device not in self._devices | {"cpu", "meta"}:
            raise CaptureError(
                f"the model cannot be captured: {line_that_runs(self._model)}: a tensor is put on {device!r}, but the "
                f"model is on {' and '.join(sorted(self._devices))}; use the device of another tensor at this line "
                "(device=x.device)"
            )


def _is_one(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one value of the trace."""
    return a is b or (exports.traced_node(a) is not None and exports.traced_node(a) is exports.traced_node(b))


def _stacked(data: Any) -> Tensor:
    """The tensor of a list that has traced tensors. No gradient flows through it."""
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(each) for each in data])
    return data.detach() if isinstance(data, Tensor) else torch.tensor(data)


def _type_of(device: Any) -> str | None:
    """The type of a device, such as "cuda". None for a value that names no device."""
    device = device.device if isinstance(device, Tensor) else device
    return str(device).partition(":")[0] if isinstance(device, (str, torch.device)) else None


def refuse_changing(decisions: Iterable[Decision], updates: Iterable[str]) -> None:
    """Raise `CaptureError` if the model read a value of a buffer that its forward pass changes."""
    for decision in decisions:
        changed = sorted({*decision.buffers}.intersection(updates))
        if changed:
            raise CaptureError(
                f"the model cannot be captured: {decision.line}: `{decision.code}` reads the buffer {changed[0]!r}, "
                f"which the forward pass changes; {_UNCHANGED}"
            )
