"""`embedding_bag` becomes a look-up and a sum, so that ids, width and rows of the table can be split."""

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import Compute, Rewrite, argument, value

SUM, MEAN = 0, 1


def _bags(emit: Compute, node: fx.Node) -> list[fx.Node] | None:
    """The bags, if the model uses the first output only, with a sum or a mean."""
    used = [user for user in node.users if user.users]
    is_plain = all(user.target is operator.getitem and user.args[1] == 0 for user in used)
    return [_summed(emit, node)] if is_plain and argument(node, "mode") in (SUM, MEAN) else None


BAGS: Mapping[Any, Rewrite] = {aten.embedding_bag.padding_idx: _bags, aten.embedding_bag.default: _bags}


def _summed(emit: Compute, node: fx.Node) -> fx.Node:
    weight, ids, offsets = (argument(node, name) for name in ("weight", "indices", "offsets"))
    num_bags, num_ids = value(node)[0].shape[0], value(ids).shape[0]
    padding = argument(node, "padding_idx") if node.target is aten.embedding_bag.padding_idx else None
    is_even = _of_one_length(offsets, num_ids, num_bags)
    shape = [num_bags, num_ids // num_bags] if is_even else [num_ids]
    ids = emit(aten.reshape.default, ids, shape)
    rows = emit(aten.embedding.default, weight, ids, -1, argument(node, "scale_grad_by_freq"))
    dtype = value(weight).dtype
    factors = [argument(node, "per_sample_weights")]
    counted = emit(aten.ones_like.default, ids, dtype=dtype)
    if padding is not None:
        counted = emit(aten.to.dtype, emit(aten.ne.Scalar, ids, padding), dtype)
        factors.append(counted)
    for factor in factors:
        if factor is not None:
            rows = emit(aten.mul.Tensor, rows, emit(aten.reshape.default, factor, [*shape, 1]))
    if is_even:
        total, count = emit(aten.sum.dim_IntList, rows, [1]), emit(aten.sum.dim_IntList, counted, [1])
    else:
        places = emit(aten.arange.default, num_ids, dtype=value(offsets).dtype, device=value(ids).device)
        if argument(node, "include_last_offset"):
            offsets = emit(aten.slice.Tensor, offsets, 0, 0, num_bags)
        bags = emit(aten.sub.Tensor, emit(aten.bucketize.Tensor, places, offsets, right=True), 1)
        like = {"dtype": dtype, "device": value(weight).device}
        total = emit(aten.full.default, [num_bags, value(weight).shape[1]], 0.0, **like)
        total = emit(aten.index_add.default, total, 0, bags, rows)
        count = emit(aten.index_add.default, emit(aten.full.default, [num_bags], 0.0, **like), 0, bags, counted)
    if argument(node, "mode") == SUM:
        return total
    count = emit(aten.unsqueeze.default, emit(aten.clamp.default, count, 1), 1)
    return emit(aten.div.Tensor, total, count)


def _of_one_length(offsets: Any, num_ids: int, num_bags: int) -> bool:
    """Whether `offsets` count from 0 in equal steps, as they do for ids of two dimensions."""
    if offsets.target is not aten.arange.start_step or not num_bags or num_ids % num_bags:
        return False
    start, stop, step = (*offsets.args, 1)[:3]
    return (start, stop, step) == (0, num_ids, num_ids // num_bags)
