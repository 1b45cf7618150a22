"""Products with a transposed weight become `linear`, so that one rule and one labelling cover every spelling."""

from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import arg

TRANSPOSES = {aten.t.default, aten.numpy_T.default}


def matmul_to_linear(graph: fx.Graph) -> None:
    """Replace ``x @ w.T`` and ``x @ w.T + b``. The weight (out, in) and the bias (out,) must be placeholders."""
    for node in list(graph.nodes):
        if node.target not in (aten.matmul.default, aten.mm.default):
            continue
        turned = arg(node, 1)
        if turned.target not in TRANSPOSES or arg(turned, 0).op != "placeholder":
            continue
        weight = arg(turned, 0)
        if weight.meta["val"].dim() != 2 or arg(node, 0).meta["val"].dim() < 2:
            continue
        last, bias = _with_bias(node, weight)
        with graph.inserting_before(last):
            linear = graph.call_function(aten.linear.default, (node.args[0], weight, *bias))
        linear.meta = dict(last.meta)
        last.replace_all_uses_with(linear)


def _with_bias(node: fx.Node, weight: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The addition of a bias to a product, with the bias, if it is the product's only use. Otherwise the product."""
    only = next(iter(node.users)) if len(node.users) == 1 else node
    if only.target is not aten.add.Tensor or only.args[0] is not node or only.kwargs:
        return node, ()
    bias = only.args[1]
    if not isinstance(bias, fx.Node) or bias.op != "placeholder":
        return node, ()
    value, product = bias.meta["val"], node.meta["val"]
    fits = tuple(value.shape) == (weight.meta["val"].shape[0],) and value.dtype == product.dtype
    return (only, (bias,)) if fits else (node, ())
