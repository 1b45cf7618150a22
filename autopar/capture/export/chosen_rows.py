"""Rows that data chooses: ``x[mask]``, ``nonzero()``, ``torch.where(mask)``. All rows stay, and a mask counts some.

A trace has fixed shapes. So the rows that a mask of N elements chooses are traced as N rows. A function of each row by
itself runs on all of them (`_by_row` tries it on random rows). A sum, a mean, a loss or a write counts the chosen rows
alone. Any other function is refused.
"""

import builtins
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from autopar._torch import exports
from autopar._torch.private import pytree
from autopar.errors import CaptureError

_ROWS, _TRIALS = 6, (slice(0, 3), slice(3, 6), slice(1, 6, 2))
_PROPERTIES = {"dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_cpu", "is_leaf", "is_meta"}
_ABOUT = _PROPERTIES | {"dim", "is_floating_point", "is_complex", "get_device", "is_contiguous", "ndimension"}
_FRESH = ("new_", "zeros", "ones", "full", "empty")
_LEAST = {"min": 1, "amin": 1, "max": -1, "amax": -1}  # and the sign of the infinity that changes no result
_PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "embedding")  # of each row with weights, which may be large
_WITH_COUNTS = ("add", "sub", "mul", "div", "true_divide", "truediv", "radd", "rsub", "rmul", "rtruediv", "rdiv", "pow")
# draws of every element or row by itself
_DRAWS: tuple[str, ...] = ("dropout", "dropout_", "uniform_", "normal_", "bernoulli", "bernoulli_", "exponential_")
_DRAWS += ("multinomial", "rand", "randn", "rand_like", "randn_like", "gumbel_softmax")
DIVISIONS = ("div", "true_divide", "truediv", "divide")
_ADDS = ("index_add", "index_add_", "scatter_add", "scatter_add_")


class Trace(Protocol):
    """What a function of chosen rows asks of the trace."""

    def is_fixed(self, mask: Tensor) -> bool: ...  # whether the mask chooses a fixed number of rows
    def constant(self, tensor: Tensor) -> Tensor | None: ...  # the value of a tensor that is a constant
    def is_tested(self, mask: fx.Node | None) -> bool: ...  # whether the code asked if it is true anywhere, and ran on
    def test(self, some: Tensor, answer: bool, mask: fx.Node | None, chosen: "ChosenRows | None" = None) -> bool: ...
    def refused_rows(self, chosen: "ChosenRows") -> CaptureError: ...  # of code that needs their number or order


class ChosenRows:
    """What data chooses among N rows: the true elements of a mask with N elements."""

    def __init__(self, mask: Tensor, trace: Trace) -> None:
        self.mask, self.flat, self.version, self.trace = mask, mask.flatten().clone(), mask._version, trace

    def divisor(self) -> Tensor:
        """How many rows are chosen, as a divisor. Behind a test for no rows it is one instead of none."""
        number = self.flat.sum()
        return number.clamp(min=1) if self.trace.is_tested(exports.traced_node(self.mask)) else number

    def refusal(self) -> CaptureError:
        """The error of code that needs the number or the order of the rows."""
        return self.trace.refused_rows(self)

    def is_same(self, other: "ChosenRows") -> bool:
        """Whether both are made of one mask, which did not change since."""
        is_one = same_value(exports.traced_node(self.mask), exports.traced_node(other.mask))
        return self is other or (is_one and self.version == other.version)

    def filled(self, x: Tensor, value: float) -> Tensor:
        """The rows of x, with `value` in rows that are not chosen."""
        chosen = self.flat.reshape(-1, *[1] * (x.dim() - 1))
        return torch.where(chosen, x, torch.full((), value, dtype=x.dtype, device=x.device))

    def rows(self, x: Tensor) -> Tensor:
        """Chosen rows. The others get a number that is an index, and that logarithms, roots and splines take."""
        marked: Tensor = self.mark(self.filled(x, 0.5 if x.is_floating_point() else 0))
        return marked

    def mark(self, result: Any) -> Any:
        """The results, whose tensors of N rows are chosen rows."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == len(self.flat):
                leaf.chosen = self  # type: ignore[attr-defined]
        return result


class Count(torch.SymInt):
    """A number of elements of chosen rows, with arithmetic. No `int`: Python reads the number of one without asking."""

    def __init__(self, chosen: ChosenRows, times: int) -> None:
        self.chosen, self.times = chosen, times  # `times`: elements of a row

    @property
    def size(self) -> int:
        """The number of elements of all rows."""
        return len(self.chosen.flat) * self.times

    def number(self) -> Tensor:
        """The number in double precision, as Python divides integers."""
        return self.chosen.flat.sum(dtype=torch.float64) * self.times

    def divisor(self) -> Tensor:
        """The number, and one instead of none behind a test for no rows."""
        return self.chosen.divisor().double() * self.times


def _refused(count: Count, *_: Any) -> Any:
    raise count.chosen.refusal()


def _computed(name: str) -> Callable[..., Any]:
    def compute(count: Count, *others: Any) -> Any:
        if name == "__rtruediv__":
            return others[0] / count.divisor()
        numbers = [other.number() if type(other) is Count else other for other in others]
        return getattr(count.number(), name)(*numbers)

    return compute


def _tested(name: str) -> Callable[[Count, Any], bool]:
    def compare(count: Count, other: Any) -> bool:
        chosen = count.chosen
        if type(other) is Count and count.times == other.times and chosen.is_same(other.chosen):
            return bool(getattr(operator, name)(0, 0))
        answer = answer_if_some(name, other, count.times)
        if answer is None:
            raise chosen.refusal()
        return chosen.trace.test(chosen.flat.any(), answer, exports.traced_node(chosen.mask), chosen)

    return compare


def answer_if_some(name: str, other: Any, times: int = 1) -> bool | None:
    """The answer of a comparison of the number of chosen elements. None unless it tells no rows from some rows."""
    if type(other) not in (int, float) or not times:
        return None
    none, some, many = (bool(getattr(operator, name)(number, other)) for number in (0, times, float("inf")))
    return some if none != some == many else None


_OF_SYMBOLS = {name for name, f in vars(torch.SymInt).items() if name[:2] == "__" and callable(f)} - {*dir(object)}
for _name in _OF_SYMBOLS | {"__rand__", "__ror__", "__rxor__", "__lshift__", "__rshift__", "__divmod__", "__rdivmod__"}:
    setattr(Count, _name, _refused)
for _name in ["add", "sub", "mul", "truediv", "pow", "radd", "rsub", "rmul", "rtruediv", "neg"]:
    setattr(Count, f"__{_name}__", _computed(f"__{_name}__"))
for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    setattr(Count, f"__{_name}__", _tested(_name))
Count.__bool__ = lambda count: count != 0  # type: ignore[method-assign]
Count.__repr__ = lambda count: "<the number of chosen rows>"  # type: ignore[method-assign]
Count.__hash__ = object.__hash__  # type: ignore[method-assign]


@contextmanager
def counted_lengths() -> Iterator[None]:
    """A context in which ``len()`` of chosen rows is a `Count`, and ``max(count, 1)`` computes its number."""
    plain, most = len, max

    def length(value: Any) -> Any:
        try:
            return plain(value)
        except CaptureError as error:
            if (count := getattr(error, "length", None)) is None:
                raise
            return count

    def largest(*values: Any, **options: Any) -> Any:
        counts = [value for value in values if type(value) is Count]
        if plain(counts) != 1 or plain(values) != 2 or options:
            return most(*values, **options)
        other = values[type(values[0]) is Count]
        return torch.clamp(counts[0].number(), min=other)

    with patch.object(builtins, "len", length), patch.object(builtins, "max", largest):
        yield


def chosen_of(values: Any) -> Iterator[ChosenRows]:
    """What chose the rows of tensors, and their numbers, in nested values."""
    for leaf in pytree.tree_leaves(values):
        for part in (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,):
            if hasattr(part, "chosen"):
                yield part.chosen


def choose(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], trace: Trace) -> Any:
    """The result of a call that chooses rows by a mask, or NotImplemented."""
    name = getattr(func, "__name__", "")
    if func is Tensor.__getitem__:
        mask, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not _is_mask(mask) or any(isinstance(leaf, Tensor) for leaf in rest) or trace.is_fixed(mask):
            return NotImplemented
        rows = args[0].flatten(0, mask.dim() - 1)
        return ChosenRows(mask, trace).rows(rows[(slice(None), *rest)] if rest else rows)
    if name == "masked_select" and _is_mask((given := (*args, *kwargs.values()))[1]) and not trace.is_fixed(given[1]):
        x, mask = torch.broadcast_tensors(*given)
        return ChosenRows(mask, trace).rows(x.flatten())
    finds = name in ("nonzero", "argwhere") or (func is torch.where and len(args) == 1 and not kwargs)
    if not finds or not args[0].dim() or exports.traced_node(args[0]) is None or trace.is_fixed(mask := args[0] != 0):
        return NotImplemented
    chosen = ChosenRows(mask, trace)
    places = _places(mask.shape, mask.device)
    return chosen.mark(tuple(places) if name == "where" or kwargs.get("as_tuple") else torch.stack(places, 1))


def run_with_chosen(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call with chosen rows. Raises their `refusal` if it needs their number or their order."""
    first, *others = chosen_of((args, dict(kwargs)))
    name, x = getattr(func, "__name__", ""), args[0] if args else None
    name = func.__self__.__name__ if name == "__get__" else name
    if name in _ABOUT:
        return func(*args, **kwargs)
    if name in ("shape", "size", "numel", "nelement", "__len__") and x is not None:
        return _sizes(x, name, args[1:])
    if name.strip("_") in _WITH_COUNTS:
        divides = name.strip("_") in DIVISIONS
        args = tuple((leaf.divisor() if divides else leaf.number()) if type(leaf) is Count else leaf for leaf in args)
        if not any(hasattr(leaf, "chosen") for leaf in args):
            return func(*args, **kwargs)
    given, named = pytree.tree_map(lambda leaf: leaf.size if type(leaf) is Count else leaf, (args, dict(kwargs)))
    if all(map(first.is_same, others)):
        for rule in (_selected, _written, _reduced):
            result = rule(func, name, given, named, first)
            if result is not NotImplemented:
                return result
        if name.endswith(_DRAWS) or _by_row(func, name, args, dict(kwargs)):
            return first.mark(func(*given, **named))
    raise first.refusal()


def _sizes(x: Any, name: str, dims: tuple[Any, ...]) -> Any:
    shape = (Count(x.chosen, 1), *x.shape[1:])
    if name == "shape" or (name == "size" and not dims):
        return shape
    if name == "size":
        return shape[dims[0]]
    if name == "__len__":  # Python wants an integer
        error = x.chosen.refusal()
        error.length = shape[0]
        raise error
    return Count(x.chosen, prod(x.shape[1:]))


def _selected(_: Any, name: str, args: Any, __: Any, chosen: ChosenRows) -> Any:
    """Rows at the places of the chosen elements, without an index. Of chosen rows, the rows that a mask chooses."""
    if name != "__getitem__":
        return NotImplemented
    x, items = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if hasattr(x, "chosen"):
        mask = items[0]
        if len(items) > 1 or not _is_mask(mask) or (mask.dim() > 1 and not hasattr(mask, "chosen")):
            return NotImplemented
        here = chosen.flat.reshape(-1, *[1] * (mask.dim() - 1))
        return ChosenRows(here & mask, chosen.trace).rows(x.flatten(0, mask.dim() - 1))
    dims = [_place(item, chosen) for item in items if isinstance(item, Tensor)]
    rest = items[len(dims) :]
    shape, wide = chosen.mask.shape, chosen.mask.dim()
    if any(isinstance(leaf, Tensor) for leaf in rest) or None in dims:
        return NotImplemented
    if len(dims) == 1:
        around = [size if dim == dims[0] else 1 for dim, size in enumerate(shape)]
        x = x.reshape(*around, *x.shape[1:]).expand(*shape, *x.shape[1:])
    elif dims != list(range(wide)):
        return NotImplemented
    rows = x.flatten(0, wide - 1)
    return chosen.rows(rows[(slice(None), *rest)] if rest else rows)


def _written(func: Any, name: str, args: Any, kwargs: Any, chosen: ChosenRows) -> Any:
    """Chosen rows that are written to their places in another tensor, or added there."""
    x, shape = args[0], chosen.mask.shape
    if hasattr(x, "chosen"):
        return NotImplemented
    if name in ("__setitem__", "masked_scatter", "masked_scatter_") and _is_mask(args[1]):
        mask, rows = args[1], args[2]
        if hasattr(mask, "chosen") or not hasattr(rows, "chosen") or not chosen.is_same(ChosenRows(mask, chosen.trace)):
            return NotImplemented
        wide = mask.reshape(*shape, *[1] * (x.dim() - mask.dim()))
        new = torch.where(wide, rows.reshape(*shape, *rows.shape[1:]), x)
        return new if name == "masked_scatter" else x.copy_(new)
    if name == "__setitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not all(isinstance(item, Tensor) and hasattr(item, "chosen") for item in index) or x.dtype is torch.bool:
            return NotImplemented
        old = _selected(None, "__getitem__", (x, index), {}, chosen)
        old = x[index] if old is NotImplemented else old
        return _added(x, index, chosen.filled(args[2] - old, 0.0), chosen)
    if name not in _ADDS or args[1] != 0 or len(args) < 4 or kwargs or not all(map(hasattr, args[2:], ["chosen"] * 2)):
        return NotImplemented
    rows = chosen.filled(args[3], 0.0)
    if name.startswith("scatter"):
        return func(*args[:3], rows)
    return _added(x if name.endswith("_") else x.clone(), (args[2],), rows, chosen)


def _added(x: Tensor, index: tuple[Tensor, ...], rows: Tensor, chosen: ChosenRows) -> Tensor:
    """x, to which rows at places are added."""
    dims = [_place(item, chosen) for item in index]
    if dims == list(range(chosen.mask.dim())):
        return x.add_(rows.reshape(x.shape))
    if len(dims) > 1 or dims[0] is None:
        return x.index_put_(index, rows, accumulate=True)
    others = [dim for dim in range(chosen.mask.dim()) if dim != dims[0]]
    return x.add_(rows.reshape(*chosen.mask.shape, *rows.shape[1:]).sum(others))


def _place(item: Any, chosen: ChosenRows) -> int | None:
    """The dimension of the mask in which an index holds the places of the chosen elements. None for other indices."""
    index = chosen.trace.constant(item) if hasattr(item, "chosen") and item.dim() == 1 else None
    if index is None:
        return None
    with exports.without_tracing():
        places = _places(chosen.mask.shape, index.device)
        return next((dim for dim, place in enumerate(places) if torch.equal(place, index)), None)


def _places(shape: torch.Size, device: torch.device) -> list[Tensor]:
    """The position of each element of a tensor, for every dimension."""
    indices = [torch.arange(size, device=device) for size in shape]
    return [place.flatten() for place in torch.meshgrid(*indices, indexing="ij")]


def _reduced(func: Any, name: str, args: Any, kwargs: Any, chosen: ChosenRows) -> Any:
    """A sum, a mean, an extreme or a loss of the chosen rows."""
    x: Any = args[0] if args else None
    if func in (F.cross_entropy, F.nll_loss) and len(args) > 1 and hasattr(args[1], "chosen") and args[1].dim() == 1:
        ignored = kwargs.get("ignore_index", -100)
        return chosen.mark(func(x, chosen.filled(args[1], ignored), *args[2:], **kwargs))
    if func is F.ctc_loss and hasattr(args[1], "chosen") and chosen.mask.dim() == 2:  # targets of all rows, in one row
        order = torch.argsort(chosen.mask.int(), dim=1, descending=True, stable=True)
        return func(x, args[1].reshape(chosen.mask.shape).gather(1, order), *args[2:], **kwargs)
    if "reduction" in kwargs and name in dir(F) and kwargs["reduction"] != "none":
        options = kwargs | {"reduction": "none"} | {n: None for n in ("reduce", "size_average") if n in kwargs}
        if not _by_row(func, name, args, options) or (losses := func(*args, **options)).shape[:1] != chosen.flat.shape:
            return NotImplemented
        reduction = "sum" if kwargs["reduction"] == "batchmean" else kwargs["reduction"]
        total = _reduced(None, reduction, (chosen.mark(losses),), {}, chosen)
        return total / chosen.divisor() if kwargs["reduction"] == "batchmean" else total
    if not hasattr(x, "chosen") or any(isinstance(leaf, Tensor) for leaf in args[1:]):
        return NotImplemented
    if name in _LEAST and len(args) == 1 and not kwargs:
        return getattr(chosen.filled(x, _LEAST[name] * float("inf")), name)()
    if name not in ("sum", "mean"):
        return NotImplemented
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = list(range(x.dim())) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    dims = [dim % x.dim() for dim in dims]
    if 0 not in dims:
        return NotImplemented
    total = chosen.filled(x, 0.0).sum(*args[1:], **kwargs)
    return total if name == "sum" else total / (chosen.divisor() * prod(x.shape[dim] for dim in dims if dim))


def _by_row(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of some rows gives these rows of the function of all rows: it is tried on random values."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if name in _PRODUCTS and not any(hasattr(leaf, "chosen") for leaf in leaves[1:]):
        return True

    def called(values: list[Any]) -> list[Any]:
        copies = [value.clone() if isinstance(value, Tensor) else value for value in values]
        given, named = pytree.tree_unflatten(copies, spec)
        result = func(*given, **named)
        return pytree.tree_leaves(copies[0] if result is None else result)

    with exports.without_tracing(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        values = [_random(leaf) for leaf in leaves]
        try:
            every = called(values)
            for part in _TRIALS:
                pairs = zip(leaves, values, strict=True)
                parts = [3 * x.times if type(x) is Count else v[part] if hasattr(x, "chosen") else v for x, v in pairs]
                for whole, rows in zip(every, called(parts), strict=True):
                    is_fresh = name.startswith(_FRESH) and whole.shape == rows.shape
                    if is_fresh and "empty" in name:
                        continue
                    own_rows = whole if is_fresh else whole[part]
                    is_alike = is_fresh or (len(whole) == _ROWS and own_rows.shape == rows.shape)
                    if not is_alike or not torch.allclose(own_rows, rows, 1e-3, 1e-3, equal_nan=True):
                        return False
        except Exception:
            return False
    return True


def _random(leaf: Any) -> Any:
    """Random values like a tensor. Chosen rows are few."""
    if type(leaf) is Count:
        return _ROWS * leaf.times
    if not isinstance(leaf, Tensor):
        return leaf
    shape = (_ROWS, *leaf.shape[1:]) if hasattr(leaf, "chosen") else tuple(leaf.shape)
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex128 if leaf.dtype.is_complex else torch.float64)
    return torch.randint(0, 2, shape).to(leaf.dtype)


def same_value(first: Any, second: Any) -> bool:
    """Whether two nodes are one call, perhaps written twice, and nothing is written in between."""
    if first is second or not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return first is second or (not isinstance(first, fx.Node) and first == second)
    if first.op != "call_function" or first.target is not second.target or first.kwargs != second.kwargs:
        return False
    early, late = (first, second) if first < second else (second, first)
    while early is not late:
        early = early.next
        if getattr(getattr(early.target, "_schema", None), "is_mutable", False):
            return False
    return len(first.args) == len(second.args) and all(map(same_value, first.args, second.args))


def _is_mask(value: Any) -> bool:
    is_mask = isinstance(value, Tensor) and value.dtype is torch.bool and value.dim() > 0
    return is_mask and exports.traced_node(value) is not None
