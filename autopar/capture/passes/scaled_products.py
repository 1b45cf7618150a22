"""Linear layers of repeated blocks, with operands of eight bits (`autopar.rules.scaled_product`).

Embeddings, heads and routers stay in 16 bits: their results choose or are chosen by index, and rounding there costs
more than it saves. So does a layer whose sizes the kernels do not take.
"""

from collections.abc import Mapping

from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import operator_name
from autopar.ir.program import Role
from autopar.rules.scaled_product import MULTIPLES, SCALED_LINEAR

_CHOICES = frozenset(["topk", "sort", "argsort", "argmax", "max"])


def scale_products(graph: fx.Graph, ports: Mapping[str, Role], format: str) -> None:
    """Replace the linear layers of a block's graph, in place. A bias is added in the dtype of the results."""
    for node in list(graph.nodes):
        if node.target is aten.linear.default and _is_scaled(node, ports, format):
            _replace(graph, node, format)


def _is_scaled(node: fx.Node, ports: Mapping[str, Role], format: str) -> bool:
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    held = weight.args[0] if weight.target is aten.t.default else weight
    if not isinstance(held, fx.Node) or ports.get(held.name) != "parameter":
        return False
    fits = all(size % MULTIPLES[format] == 0 for size in weight.meta["info"].shape)
    return fits and not _chooses(node)


def _chooses(node: fx.Node) -> bool:
    """Whether a choice by value reads the result, through operators that no other product feeds."""
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if user.op != "call_function" or user in seen or user.target is aten.linear.default:
                continue
            if operator_name(user).partition(".")[0] in _CHOICES:
                return True
            if user.meta["info"].shape == node.meta["info"].shape:  # softmax, a bias, a mask
                seen.add(user)
                stack.append(user)
    return False


def _replace(graph: fx.Graph, node: fx.Node, format: str) -> None:
    x, weight, *bias = node.args
    if not bias or bias[0] is None:
        node.target, node.args = SCALED_LINEAR, (x, weight, format)
        return
    with graph.inserting_before(node):
        product = graph.call_function(SCALED_LINEAR, (x, weight, format), name=f"{node.name}_scaled")
    product.meta = dict(node.meta)
    node.meta["key"] = node.meta["key"].replace(":linear:", ":bias:")
    node.target, node.args = aten.add.Tensor, (product, bias[0])
