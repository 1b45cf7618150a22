"""Indexing by a list of consecutive numbers, ``x[..., [-2], :]``, is traced as a slice.

PyTorch turns the list into a tensor on the device of the indexed tensor. On meta, the numbers would be lost.
"""

from typing import Any

import torch


def as_slices(x: torch.Tensor, index: Any) -> Any:
    """The index with its list as a slice if all others are slices, None or an ellipsis; or the unchanged index."""
    items = index if isinstance(index, tuple) else (index,)
    places = [k for k, item in enumerate(items) if isinstance(item, list)]
    plain = all(item is None or item is Ellipsis or isinstance(item, (slice, list)) for item in items)
    if len(places) != 1 or not plain:
        return index
    place = places[0]
    numbers = items[place]
    consumed = [k for k, item in enumerate(items) if item is not None and item is not Ellipsis]
    after_ellipsis = any(item is Ellipsis for item in items[:place])
    dim = consumed.index(place) if not after_ellipsis else consumed.index(place) - len(consumed)
    if not numbers or not all(type(n) is int and -x.shape[dim] <= n < x.shape[dim] for n in numbers):
        return index
    first = numbers[0] % x.shape[dim]
    if [n % x.shape[dim] for n in numbers] != list(range(first, first + len(numbers))):
        return index
    return (*items[:place], slice(first, first + len(numbers)), *items[place + 1 :])
