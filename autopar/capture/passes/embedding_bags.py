"""`embedding_bag` becomes a look-up and a sum, so that ids, width and rows of the table can be split."""

import operator
from functools import partial
from typing import Any

from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import argument, compute, value

SUM, MEAN = 0, 1
BAGS = {aten.embedding_bag.padding_idx, aten.embedding_bag.default}


def embedding_bags(graph: fx.Graph) -> None:
    """Replace `embedding_bag` if the model uses its first output only, with a sum or a mean."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in BAGS or argument(node, "mode") not in (SUM, MEAN):
            continue
        used = [user for user in node.users if user.users]
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in used):
            continue
        with graph.inserting_before(node):
            new = _summed(graph, node)
        for user in list(node.users):
            if user in used:
                user.replace_all_uses_with(new)
            graph.erase_node(user)
        graph.erase_node(node)


def _summed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = partial(compute, graph, node)
    weight, ids, offsets = (argument(node, name) for name in ("weight", "indices", "offsets"))
    num_bags, num_ids = value(node)[0].shape[0], value(ids).shape[0]
    padding = argument(node, "padding_idx") if node.target is aten.embedding_bag.padding_idx else None
    is_even = _of_one_length(offsets, num_ids, num_bags)
    shape = [num_bags, num_ids // num_bags] if is_even else [num_ids]
    ids = made(aten.reshape.default, ids, shape)
    rows = made(aten.embedding.default, weight, ids, -1, argument(node, "scale_grad_by_freq"))
    dtype = value(weight).dtype
    factors = [argument(node, "per_sample_weights")]
    counted = made(aten.ones_like.default, ids, dtype=dtype)
    if padding is not None:
        counted = made(aten.to.dtype, made(aten.ne.Scalar, ids, padding), dtype)
        factors.append(counted)
    for factor in factors:
        if factor is not None:
            rows = made(aten.mul.Tensor, rows, made(aten.reshape.default, factor, [*shape, 1]))
    if is_even:
        total, count = made(aten.sum.dim_IntList, rows, [1]), made(aten.sum.dim_IntList, counted, [1])
    else:
        places = made(aten.arange.default, num_ids, dtype=value(offsets).dtype, device=value(ids).device)
        if argument(node, "include_last_offset"):
            offsets = made(aten.slice.Tensor, offsets, 0, 0, num_bags)
        bags = made(aten.sub.Tensor, made(aten.bucketize.Tensor, places, offsets, right=True), 1)
        like = {"dtype": dtype, "device": value(weight).device}
        total = made(aten.full.default, [num_bags, value(weight).shape[1]], 0.0, **like)
        total = made(aten.index_add.default, total, 0, bags, rows)
        count = made(aten.index_add.default, made(aten.full.default, [num_bags], 0.0, **like), 0, bags, counted)
    if argument(node, "mode") == SUM:
        return total
    count = made(aten.unsqueeze.default, made(aten.clamp.default, count, 1), 1)
    return made(aten.div.Tensor, total, count)


def _of_one_length(offsets: Any, num_ids: int, num_bags: int) -> bool:
    """Whether `offsets` count from 0 in equal steps, as they do for ids of two dimensions."""
    if offsets.target is not aten.arange.start_step or not num_bags or num_ids % num_bags:
        return False
    start, stop, step = (*offsets.args, 1)[:3]
    return (start, stop, step) == (0, num_ids, num_ids // num_bags)
