"""Operators of our own, composite: autograd and every backend see the operators that they are made of.

``output_of(aten.topk.default, 1)`` is ``autopar::topk.default_1``: one output of an operator with several, defined from
its schema when needed. `BATCH_STATISTIC` marks the choice of batch norm between the batch's statistics and the recorded
ones. `OVER_MICRO_BATCHES` divides a term of the loss by the number of micro-batches.
"""

from functools import cache
from typing import Any

import torch

LIBRARY = torch.library.Library("autopar", "DEF")


def _batch_statistic(batch: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
    """The batch's own, as in training; evaluation replaces the call by `running`."""
    return batch.clone()


LIBRARY.define("batch_statistic(Tensor batch, Tensor running) -> Tensor")
LIBRARY.impl("batch_statistic", _batch_statistic, "CompositeImplicitAutograd")
BATCH_STATISTIC = torch.ops.autopar.batch_statistic.default
LIBRARY.define("over_micro_batches(Tensor term, Tensor count) -> Tensor")
LIBRARY.impl("over_micro_batches", lambda term, count: term / count, "CompositeImplicitAutograd")
OVER_MICRO_BATCHES = torch.ops.autopar.over_micro_batches.default


@cache
def output_of(operator: Any, index: int) -> Any:
    """The operator that yields output `index` of `operator`."""
    schema = operator._schema
    name = schema.name.split("::")[1]
    overload = f"{schema.overload_name or 'default'}_{index}"
    arguments = str(schema).partition("(")[2].rpartition(" -> ")[0]
    qualified = f"{name}.{overload}"

    def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = operator(*args, **kwargs)[index]
        return out

    LIBRARY.define(f"{qualified}({arguments} -> Tensor")
    LIBRARY.impl(qualified, compute, "CompositeImplicitAutograd")
    return getattr(getattr(torch.ops.autopar, name), overload)
