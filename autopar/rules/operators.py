"""Operators of our own, composite: autograd and every backend see the operators that they are made of.

``output_of(aten.topk.default, 1)`` is ``autopar::topk.default_1``: one output of an operator with several, defined from
its schema when needed. `BATCH_STATISTIC` marks the choice of batch norm between the batch's statistics and the recorded
ones. `OVER_MICRO_BATCHES` divides a term of the loss by the number of micro-batches.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_LIBRARY = torch.library.Library("autopar", "DEF")


def define(
    schema: str,
    compute: Callable[..., torch.Tensor],
    fake: Callable[..., torch.Tensor] | None = None,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
) -> Any:
    """Define an operator of our own: composite, or with a `fake` kernel, and then perhaps with a backward pass."""
    qualified = schema.partition("(")[0]
    name, _, overload = qualified.partition(".")
    _LIBRARY.define(schema)
    _LIBRARY.impl(qualified, compute, "CompositeExplicitAutograd" if fake else "CompositeImplicitAutograd")
    if fake:
        torch.library.register_fake(f"autopar::{qualified}", fake, lib=_LIBRARY)
    if backward:
        torch.library.register_autograd(f"autopar::{qualified}", backward, setup_context=save, lib=_LIBRARY)
    return getattr(getattr(torch.ops.autopar, name), overload or "default")


# the batch's own, as in training; evaluation replaces the call by `running`
BATCH_STATISTIC = define(
    "batch_statistic(Tensor batch, Tensor running) -> Tensor", lambda batch, running: batch.clone()
)
OVER_MICRO_BATCHES = define("over_micro_batches(Tensor term, Tensor count) -> Tensor", lambda term, count: term / count)


@cache
def output_of(operator: Any, index: int) -> Any:
    """The operator that yields output `index` of `operator`."""
    schema = operator._schema
    name = schema.name.split("::")[1]
    overload = f"{schema.overload_name or 'default'}_{index}"
    arguments = str(schema).partition("(")[2].rpartition(" -> ")[0]
    return define(f"{name}.{overload}({arguments} -> Tensor", lambda *args, **kwargs: operator(*args, **kwargs)[index])
