"""Orders of mesh dimensions over ranks: whose ranks lie farthest apart, and whose lie next to each other."""

from collections.abc import Mapping
from typing import Any

# farthest apart first; the first order is the default. Tensor ranks are neighbours in all of them, as prices have it
ORDERS = ("pp-dp-tp", "dp-pp-tp")


def strides(order: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """How many ranks lie from one rank of each dimension to the next. The ranks of `cp` lie inside of `dp`."""
    result, stride = {}, 1
    for name in reversed(order.split("-")):
        inner = ("cp", name) if name == "dp" and "cp" in sizes else (name,)
        for dim in inner:
            result[dim] = stride
            stride = stride * sizes[dim]
    return result
