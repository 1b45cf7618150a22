"""Typed access to fx nodes: PyTorch types an argument as a wide union, and a target as a function or a string."""

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.ir.program import Program
from autopar.rules.rule import TensorInfo

# operators whose result holds the elements of their operand in their places
SAME_ELEMENTS = frozenset(["alias", "clone", "contiguous", "detach", "lift_fresh_copy", "to", "_to_copy"])
Compute = Callable[..., fx.Node]  # of an operator and its arguments: a new call before a node
# the value, or the one of each output, in the place of a call; None leaves it
Rewrite = Callable[[Compute, fx.Node], fx.Node | Sequence[fx.Node] | None]
# operators whose result depends on numbers that are given to them, beside sizes of dimensions
ARITHMETIC = frozenset(["add", "sub", "mul", "div", "pow", "rsub"])


def arg(node: fx.Node, index: int) -> fx.Node:
    """The positional argument at `index`, which must be a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node), (node, index, value)
    return value


def positional(node: fx.Node, index: int, default: Any = None) -> Any:
    """The positional argument at `index`, or `default` if the call has fewer."""
    return node.args[index] if index < len(node.args) else default


def shape(node: Any) -> tuple[int, ...]:
    """The shape of a node's value in the captured program."""
    sizes: tuple[int, ...] = tuple(node.meta["info"].shape)
    return sizes


def copies(node: fx.Node) -> Iterator[fx.Node]:
    """A node, the node that it is a copy or cast of, and so on."""
    yield node
    while operator_name(node) in SAME_ELEMENTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node


def before(node: fx.Node, names: Container[str]) -> fx.Node:
    """The value before operators with these names, each of which takes it as its first operand."""
    while operator_name(node) in names and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def before_copies(node: fx.Node) -> fx.Node:
    """The value before all copies and casts."""
    return before(node, SAME_ELEMENTS)


def replace_node(node: fx.Node, new: fx.Node | Sequence[fx.Node]) -> None:
    """Put a value, or one for each output that is read, in the place of a node, and erase it."""
    if isinstance(new, fx.Node):
        node.replace_all_uses_with(new)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem, user
            if user.users:
                user.replace_all_uses_with(new[positional(user, 1)])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def numbers_of(value: Any) -> list[float]:
    """The numbers in nested arguments of an operator, in order. A bool is no number."""
    numbers = list[float]()
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(each, (tuple, list)):
            numbers += numbers_of(each)
        elif isinstance(each, (int, float)) and not isinstance(each, bool):
            numbers.append(each)
    return numbers


def value(node: Any) -> Any:
    """The traced value of a node: a tensor on meta, several tensors, or None."""
    return node.meta.get("val")


def argument(node: fx.Node, name: str) -> Any:
    """An argument of an ATen call by its name in the schema, or its default if the call does not give it."""
    for index, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            given = node.args[index] if index < len(node.args) and not declared.kwarg_only else None
            return given if given is not None else node.kwargs.get(name, declared.default_value)
    raise KeyError(f"{node.target} has no argument {name!r}")


def put(place: fx.Node, target: Any, args: Any, result: Any, like: fx.Node | None = None, /, **kwargs: Any) -> fx.Node:
    """A new call before `place`, with a known value and the metadata (such as the module) of `like` or of `place`."""
    with place.graph.inserting_before(place):
        node = place.graph.call_function(target, args, kwargs)
    node.meta = dict((like or place).meta) | {"val": result}
    if "info" in node.meta:
        node.meta |= {"info": traced_info(node, result), "batch_power": 0}
    return node


def traced_info(node: fx.Node, tensor: torch.Tensor) -> TensorInfo:
    """The description of a node's traced value. It is differentiable if an operand is, and a gradient flows."""
    stops = node.meta.get("no_grad") or operator_name(node) == "detach"
    flows = (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and not stops
    infos = [operand.meta["info"] for operand in node.all_input_nodes if "info" in operand.meta] if flows else []
    shape = tuple(int(size) for size in tensor.shape)
    return TensorInfo(shape, tensor.dtype, any(info.differentiable for info in infos))


def compute(place: fx.Node, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """As `put`, with the value that the call computes."""
    values = fx.map_arg((args, kwargs), value)
    with torch.no_grad():
        result = target(*values[0], **values[1])
    return put(place, target, args, result, like, **kwargs)


def cast_to(emit: Compute, x: Any, dtype: torch.dtype) -> Any:
    """A value in a dtype."""
    return x if value(x).dtype == dtype else emit(aten.to.dtype, x, dtype)


def rewrite(graph: fx.Graph, table: Mapping[Any, Rewrite]) -> None:
    """Put what a table writes for an operator in the place of each of its calls."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in table:
            new = table[node.target](partial(compute, node), node)
            if new is not None:
                replace_node(node, new)


def inlined(
    place: fx.Node, region: fx.Graph, inputs: Iterable[Any], meta: Mapping[str, Any], missing: Mapping[str, Any]
) -> Any:
    """The result of a region whose nodes are copied before a node, with new metadata and with what is missing in it."""
    values: dict[fx.Node, Any] = dict(zip(region.find_nodes(op="placeholder"), inputs, strict=False))
    with place.graph.inserting_before(place):
        for inner in region.nodes:
            if inner.op not in ("placeholder", "output"):
                values[inner] = place.graph.node_copy(inner, values.__getitem__)
                values[inner].meta = {**missing, **inner.meta, **meta}
    return fx.map_arg(region.output_node().args[0], values.__getitem__)


def output_nodes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The nodes that a graph returns. Its output must be a flat sequence of nodes."""
    values: Any = graph.output_node().args[0]
    assert all(isinstance(value, fx.Node) for value in values), values
    return tuple(values)


def closure(nodes: Iterable[fx.Node], without: Container[fx.Node] = ()) -> list[fx.Node]:
    """The nodes and all their direct and indirect operands, in graph order; not those in `without` or behind them."""
    inner: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in without and node not in inner:
            inner.add(node)
            stack.extend(node.all_input_nodes)
    return sorted(inner)


def computed_from(known: set[fx.Node], nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The operators among nodes in graph order that depend on `known` values alone. They are known then."""
    new = list[fx.Node]()
    for node in nodes:
        is_new = node.op == "call_function" and node not in known
        if is_new and known.issuperset(node.all_input_nodes) and not is_random(node):
            known.add(node)
            new.append(node)
    return new


def function(node: fx.Node) -> Callable[..., Any]:
    """The target of a `call_function` node."""
    assert not isinstance(node.target, str), node
    return node.target


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def operator_name(node: fx.Node) -> str:
    """The name of the function that a node calls, empty if it calls none. An ATen operator's name has no overload."""
    if node.op != "call_function":
        return ""
    target = function(node)
    return str(target._opname if hasattr(target, "_opname") else target.__name__)


def value_infos(program: Program) -> dict[str, TensorInfo]:
    """The shapes and dtypes of the values that leave a program's blocks, by name."""
    infos: dict[str, TensorInfo] = {}
    for call in program.calls:
        block = program.blocks[call.block]
        by_name = {node.name: node.meta["info"] for node in block.graph.nodes if "info" in node.meta}
        pairs = zip(call.results, block.outputs, strict=True)
        infos |= {result: by_name[output] for result, output in pairs}
    return infos
