"""One output of an operator with several: operators of our own, defined from the schema of the original when needed.

``output_of(aten.topk.default, 1)`` is ``autopar::topk.default_1``: the same arguments, one result. It is composite, so
autograd and every backend see the original operator.
"""

from functools import cache
from typing import Any

import torch

LIBRARY = torch.library.Library("autopar", "DEF")


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
