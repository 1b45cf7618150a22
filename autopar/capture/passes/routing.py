"""Routing by sorting, expressed by the operators in which tokens are parallel (`autopar.rules.routed`).

A model sorts the numbers of the experts that its tokens chose. It reads rows of tokens in this order, computes with
each row alone, and puts the results back in the order of tokens. A *region* is all of this for one sort:

    table[order], tokens[order // k]            rows in the order of experts
    rows[inverse], out[order] = rows            rows in the order of tokens
    out.index_add(0, order // k, rows)          the sum of each token's rows

Rows of one expert may lie in any order, so a rank may sort the rows of its own tokens. This is right only if nothing in
the region looks at the place of a row. The rules of the operators show it: the dimension of rows must be parallel, or
reduced by a sum, and no operand may have it in another order. Otherwise the region stays as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import (
    arg,
    argument,
    before,
    compute,
    is_random,
    operator_name,
    positional,
    replace_node,
    traced_info,
    value,
)
from autopar.capture.passes.constants import constant_of
from autopar.capture.passes.experts import are_distinct
from autopar.rules.grouped_product import GROUPED_MM
from autopar.rules.operators import output_of
from autopar.rules.registry import rule_of
from autopar.rules.routed import ORDER, PRODUCT, ROWS, TAKE, UNTAKE
from autopar.rules.rule import Call, TensorInfo

SORTS = frozenset([output_of(aten.sort.default, 1), output_of(aten.sort.stable, 1)])
ARGSORTS = frozenset([aten.argsort.default, aten.argsort.stable])
# sorted rows read from all rows or from the tokens, put back in the order of tokens, or added for each token
_Use = Literal["take", "rows", "untake", "sum"]
_Index = Literal["order", "token", "inverse"]  # the order of rows, their tokens in it, or their places in it
_READS: Mapping[str, _Use] = {"order": "take", "token": "rows", "inverse": "untake"}
_WRITES: Mapping[str, _Use] = {"order": "untake", "token": "sum"}
_TARGETS = {"take": TAKE, "rows": ROWS, "untake": UNTAKE}


def tokens_are_parallel(graph: fx.Graph) -> None:
    """Express every region of the graph by the operators of `autopar.rules.routed`."""
    for node in list(graph.nodes):
        if is_order(node):
            region = Region.of(node)
            if region is not None:
                region.write()


def is_order(node: fx.Node) -> bool:
    """Whether a node holds the order that sorts integers in one dimension, the least first."""
    if node.op != "call_function" or node.target not in SORTS | ARGSORTS or value(node).dim() != 1:
        return False
    keys = value(node.args[0]).dtype
    return not argument(node, "descending") and not keys.is_floating_point and keys is not torch.bool


@dataclass(frozen=True, eq=False)
class Region:
    """What a graph does with the rows of one sort of `keys`. `k` rows belong to each token."""

    order: fx.Node
    keys: fx.Node
    k: int
    # uses of rows by operators, and the position of the operand that is read or put back
    uses: dict[fx.Node, tuple[_Use, int]] = field(default_factory=dict)
    products: list[fx.Node] = field(default_factory=list)

    @staticmethod
    def of(order: fx.Node) -> "Region | None":
        """The region of an order. None if something else is done with it, or with its rows."""
        keys = arg(order, 0)
        tokens = {k for user in order.users for k in [_rows_of_a_token(user, order)] if k}
        k = tokens.pop() if tokens else _last_size(keys)
        region = Region(order, keys, k)
        fits = not tokens and region.num_rows % k == 0 and region._finds_uses("order", order) and region._is_closed()
        return region if fits else None

    @property
    def num_rows(self) -> int:
        return len(value(self.order))

    # ---- what is done with the order ----

    def _finds_uses(self, kind: _Index, index: fx.Node) -> bool:
        """Find the uses of an index. False if there is one of another kind."""
        return all(self._is_use(kind, at, user) for at, user in _uses(index))

    def _is_use(self, kind: _Index, index: fx.Node, user: fx.Node) -> bool:
        if operator_name(user) in _SHAPED:
            return True
        reads, written = _reads(user, index), _written_by(user, index)
        if kind == "order":
            if _rows_of_a_token(user, index) == self.k or (reads and _numbers_tokens(arg(user, 0), self.k)):
                return self._finds_uses("token", user)
            if _inverts(user, index):
                return self._finds_uses("inverse", user)
        count = self.num_rows // self.k if kind == "token" else self.num_rows
        if reads and len(value(user.args[0])) == count:
            self.uses[user] = _READS[kind], 0
            return True
        if written is None or kind not in _WRITES or len(value(user)) != count or _adds(user) != (kind == "token"):
            return False
        self.uses[user] = _WRITES[kind], written
        return True

    # ---- what is done with the rows ----

    def _is_closed(self) -> bool:
        """Whether each operator between takes and untakes works on every row alone."""
        of_rows = {n: 0 for n, (use, _) in self.uses.items() if use in ("take", "rows")}  # and their dimension of rows
        given_back = {n: position for n, (_, position) in self.uses.items() if n not in of_rows}
        for user in self.order.graph.nodes:  # in their order, so that all operands are known
            if of_rows.keys().isdisjoint(user.all_input_nodes):
                continue
            if user in given_back:
                others = [a for k, a in enumerate(user.args) if k != given_back[user]]
                if self.uses[user][0] == "sum" and any(a in of_rows for a in others if isinstance(a, fx.Node)):
                    return False
                continue  # what rows are put into is overwritten
            if user.op != "call_function" or user in self.uses or is_random(user):
                return False
            dim = self._dim_of_result(user, of_rows)
            if dim is None:
                return False
            if dim >= 0:
                of_rows[user] = dim
        return bool(given_back) and all(of_rows.get(arg(n, k)) == 0 for n, k in given_back.items())

    def _dim_of_result(self, user: fx.Node, of_rows: dict[fx.Node, int]) -> int | None:
        if self._is_product(user, of_rows):
            return 0
        counted = _counted_by_search(user)
        if counted is not None and self._is_sorted_keys(counted):
            return -1
        return _dim_of_rows(user, of_rows)

    def _is_product(self, user: fx.Node, of_rows: dict[fx.Node, int]) -> bool:
        """Whether a product in groups has groups that are the experts of this region."""
        if user.target is not GROUPED_MM or of_rows.get(arg(user, 0)) != 0 or user.args[1] in of_rows:
            return False
        counted = _counted_by_ends(arg(user, 2))
        is_searched = _counted_by_search(before(arg(user, 2), _CASTS)) is not None  # of sorted numbers alone
        if counted is None or not (self._is_sorted_keys(counted) or (self._is_keys(counted) and not is_searched)):
            return False
        self.products.append(user)
        return True

    def _is_keys(self, node: fx.Node) -> bool:
        return before(node, _SAME) is before(self.keys, _SAME)

    def _is_sorted_keys(self, node: fx.Node) -> bool:
        source = before(node, _SAME)
        return self.uses.get(source) == ("take", 0) and self._is_keys(arg(source, 0))

    # ---- rewriting ----

    def write(self) -> None:
        """Replace the region in place."""
        tokens, k = self.num_rows // self.k, self.k
        chosen = arg(self.keys, 0) if self.keys.target is aten.reshape.default else self.keys
        is_choices = tuple(value(chosen).shape) == (tokens, k)
        choices = chosen if is_choices else compute(self.order, aten.reshape.default, self.keys, [tokens, k])
        order = compute(self.order, ORDER, choices)
        expert = compute(self.order, TAKE, self.keys, order, k)
        for node in self.products:
            replace_node(node, compute(node, PRODUCT, arg(node, 0), arg(node, 1), expert, k))
        for node, (use, position) in self.uses.items():
            if use == "sum":
                self._add(node, arg(node, position), order)
            else:
                replace_node(node, compute(node, _TARGETS[use], arg(node, position), order, k))

    def _add(self, node: fx.Node, rows: fx.Node, order: fx.Node) -> None:
        """Replace the addition of every row to its token."""
        shape = [self.num_rows // self.k, self.k, *value(rows).shape[1:]]
        by_token = compute(node, aten.reshape.default, compute(node, UNTAKE, rows, order, self.k), shape)
        total = compute(node, aten.sum.dim_IntList, by_token, [1])
        if not _is_full_of(arg(node, 0), 0):
            total = compute(node, aten.add.Tensor, arg(node, 0), total)
        replace_node(node, total)


# ---- the rows of a value ----


def _dim_of_rows(node: fx.Node, of_rows: dict[fx.Node, int]) -> int | None:
    """The dimension of rows of a result: -1 if it has none. None if it depends on the places of rows."""
    out = value(node)
    if not isinstance(out, torch.Tensor):
        return None
    call, operands = Call.of(node.target, node.args, node.kwargs, traced_info(node, out), _info_of)
    rule = rule_of(call)
    having = {(k, of_rows[operand]) for k, operand in enumerate(operands) if operand in of_rows}
    fs = {rule.inputs[k][dim] for k, dim in having}
    if not rule.known or len(fs) != 1:
        return None
    factors = fs.pop()
    fixed = rule.whole | rule.outermost | rule.invariant
    if not factors or not fixed.isdisjoint(factors):
        return None
    for k, spec in enumerate(rule.inputs):
        for dim, names in enumerate(spec):
            if not set(names).isdisjoint(factors) and (names != factors or (k, dim) not in having):
                return None
    places = [dim for dim, names in enumerate(rule.output) if not set(names).isdisjoint(factors)]
    if not places:
        return -1
    return places[0] if len(places) == 1 and rule.output[places[0]] == factors else None


def _info_of(node: Any) -> TensorInfo | None:
    is_tensor = isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)
    return traced_info(node, value(node)) if is_tensor else None


# ---- indices ----


def _uses(index: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The uses of an index of rows: (the index or its copy for every column, the user)."""
    for user in index.users:
        if user.op == "call_function" and user.args[0] is index and _is_column(user, len(value(index))):
            yield from _uses(user)
        else:
            yield index, user


def _is_column(node: fx.Node, num_rows: int) -> bool:
    name, out = operator_name(node), value(node)
    if name in ("expand", "expand_as", "repeat"):
        return bool(len(out) == num_rows and len(value(node.args[0])) == num_rows and value(node.args[0]).dim() > 1)
    return name in ("unsqueeze", "reshape", *_CASTS) and bool(len(out) == num_rows == out.numel())


def _rows_of_a_token(node: fx.Node, order: fx.Node) -> int | None:
    """k, if a node is ``order // k``."""
    if node.op != "call_function" or node.args[0] is not order or len(node.args) < 2:
        return None
    name, k = operator_name(node), node.args[1]
    floors = name == "floor_divide" or (name == "div" and node.kwargs.get("rounding_mode") in ("floor", "trunc"))
    return k if floors and isinstance(k, int) and k > 0 else None


def _numbers_tokens(node: fx.Node, k: int) -> bool:
    """Whether a table has the number of the token of every row: 0, 0, 1, 1, 2, 2 for two rows of a token."""
    known = constant_of(node)
    return known is not None and known.dim() == 1 and known.tolist() == [row // k for row in range(len(known))]


def _is_range(node: fx.Node, size: int) -> bool:
    """Whether a node holds 0, 1, 2, ... up to `size`."""
    return _numbers_tokens(node, 1) and len(value(node)) == size


def _inverts(node: fx.Node, order: fx.Node) -> bool:
    """Whether a node holds the place of each row in the order."""
    if is_order(node):
        return node.args[0] is order
    written = _written_by(node, order)
    is_put = written is not None and not _adds(node) and value(node).dim() == 1
    return is_put and value(node).shape == value(order).shape and _is_range(arg(node, written or 0), len(value(order)))


def _reads(node: fx.Node, index: fx.Node) -> bool:
    """Whether a node reads the rows `index` of its first operand."""
    if node.op != "call_function" or node.args[0] is index:
        return False
    name = operator_name(node)
    if name == "index":
        return _is_only_index(node.args[1], index)
    if name not in ("index_select", "gather") or not _along_rows(node) or node.args[2] is not index:
        return False
    return name == "index_select" or bool(value(index).shape[1:] == value(node.args[0]).shape[1:])


def _written_by(node: fx.Node, index: fx.Node) -> int | None:
    """The position of the rows that a node puts at `index`."""
    if node.op != "call_function" or node.args[0] is index or len(node.args) < 3:
        return None
    name = operator_name(node)
    if name == "index_put":
        position, fits = 2, _is_only_index(node.args[1], index)
    elif name in ("index_add", "index_copy"):
        alpha = positional(node, 4, node.kwargs.get("alpha", 1))
        position, fits = 3, _along_rows(node) and node.args[2] is index and bool(alpha == 1)
    elif name in ("scatter", "scatter_add", "scatter_reduce"):
        position, fits = 3, _along_rows(node) and node.args[2] is index
        fits = fits and bool(value(index).shape[1:] == value(node).shape[1:]) and node.kwargs.get("reduce") is None
        sums = name != "scatter_reduce" or (argument(node, "reduce") == "sum" and bool(argument(node, "include_self")))
        fits = fits and sums
    else:
        return None
    rows = node.args[position] if fits else None
    is_rows = isinstance(rows, fx.Node) and value(rows).shape == (len(value(index)), *value(node).shape[1:])
    return position if is_rows else None


def _along_rows(node: fx.Node) -> bool:
    """Whether the second argument of a node, a dimension, is the first one of the result."""
    dim = node.args[1]
    return isinstance(dim, int) and dim % max(value(node).dim(), 1) == 0


def _is_only_index(indices: Any, index: fx.Node) -> bool:
    return bool(indices[0] is index and all(i is None for i in indices[1:]) and value(index).dim() == 1)


def _adds(node: fx.Node) -> bool:
    name = operator_name(node)
    return name in ("index_add", "scatter_add", "scatter_reduce") or (name == "index_put" and bool(positional(node, 3)))


# ---- values ----

_CASTS = frozenset(["to", "_to_copy"])
_SAME = _CASTS | {"reshape", "flatten", "unsqueeze", "squeeze"}  # elements in their order
_SHAPED = frozenset(["zeros_like", "ones_like", "full_like", "empty_like"])  # they read no element


def _last_size(keys: fx.Node) -> int:
    """The size of the last dimension before keys became one dimension, which holds the choices of a token."""
    shape = value(before(keys, _SAME)).shape
    return int(shape[-1]) if len(shape) > 1 else 1


def _is_full_of(node: fx.Node, number: int) -> bool:
    """Whether all elements of a node are one number, 0 or 1."""
    name = operator_name(node)
    is_filled = name in ("full", "full_like") and bool(node.args[1] == number)
    return is_filled or name in (("zeros", "zeros_like"), ("ones", "ones_like"))[number]


def _counted_by_ends(ends: fx.Node) -> fx.Node | None:
    """The numbers whose counts, added up, are the ends of groups."""
    ends = before(ends, _CASTS)
    searched = _counted_by_search(ends)
    if searched is not None:
        return searched
    if operator_name(ends) != "cumsum" or value(ends).dim() != 1:
        return None
    counts = before(arg(ends, 0), _CASTS)
    if operator_name(counts) == "sum":
        return _compared(before(arg(counts, 0), _CASTS), positional(counts, 1), len(value(counts)))
    if operator_name(counts) in ("scatter_add", "index_add", "index_put"):
        return _added(counts)
    return None


def _counted_by_search(node: fx.Node) -> fx.Node | None:
    """x, if a node holds how many elements of x are at most 0, 1, 2, ... for a sorted x."""
    if operator_name(node) != "searchsorted":
        return None
    x, numbers = node.args[:2]
    if not (isinstance(x, fx.Node) and isinstance(numbers, fx.Node)):
        return None
    is_right = bool(argument(node, "right")) or argument(node, "side") == "right"
    return x if is_right and _is_range(before(numbers, _CASTS), len(value(node))) else None


def _compared(equal: fx.Node, dims: Any, size: int) -> fx.Node | None:
    """x, if the sum over `dims` of a node counts how often x is 0, 1, 2, ..."""
    rank = value(equal).dim()
    if sorted(d % rank for d in dims or ()) != list(range(rank - 1)):
        return None
    if operator_name(equal) == "one_hot":
        return arg(equal, 0)
    if equal.target is aten.scatter.value:
        return _marked(equal)
    if operator_name(equal) != "eq" or not all(isinstance(a, fx.Node) for a in equal.args[:2]):
        return None
    for x, numbers in ((arg(equal, 0), arg(equal, 1)), (arg(equal, 1), arg(equal, 0))):
        row = before(numbers, _SAME | {"expand"})
        if _is_range(row, size) and value(numbers).shape[-1:] == (size,) and value(x).shape[-1:] == (1,):
            return x
    return None


def _marked(marks: fx.Node) -> fx.Node | None:
    """x, if a node holds zeros and a one at each place x of its last dimension. No place may be marked twice."""
    dim, places = marks.args[1], arg(marks, 2)
    is_last = isinstance(dim, int) and dim % value(marks).dim() == value(marks).dim() - 1
    fits = is_last and marks.args[3] == 1 and not marks.kwargs and _is_full_of(arg(marks, 0), 0)
    return places if fits and are_distinct(places) else None


def _added(counts: fx.Node) -> fx.Node | None:
    """x, if a node adds ones to zeros at the places x."""
    name = operator_name(counts)
    base, ones = arg(counts, 0), counts.args[2 if name == "index_put" else 3]
    index: Any = counts.args[1][0] if name == "index_put" else counts.args[2]  # type: ignore[index]
    fits = _is_full_of(base, 0) and isinstance(ones, fx.Node) and _is_full_of(ones, 1) and _adds(counts)
    return index if fits and isinstance(index, fx.Node) else None
