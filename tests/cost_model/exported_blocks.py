"""The exporting tool as a module, and totals of what a block costs."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

TOOL = Path(__file__).parents[2] / "tools" / "export_blocks.py"


@cache
def tool() -> ModuleType:
    """`tools/export_blocks.py`; needs transformers."""
    import sys

    spec = importlib.util.spec_from_file_location("export_blocks_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def totals(work: Any) -> dict[str, Any]:
    """Sums over the operators and collectives of a block, expressions or numbers."""
    operators = {"products": work.products, "eager": work.eager, "fused": work.fused}
    found = {f"{name} {pass_}": sum(getattr(o, f"{pass_}_bytes") for o in group)
             for name, group in operators.items() for pass_ in ("forward", "backward")}  # fmt: skip
    found["flops"] = sum(o.flops for o in work.products)
    for cause in ("value", "regather", "inside", "parameter"):
        for is_forward in (True, False):
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
                sent = [c for c in work.sent if (c.of, c.is_forward, c.collective) == (cause, is_forward, kind)]
                found[f"{cause} {kind} {is_forward}"] = sum(c.whole_bytes for c in sent)
    names = ("saved_eager_bytes", "saved_fused_bytes", "input_bytes")
    parameters = ("parameters_split", "parameters_whole", "parameters_expert")
    return found | {name: getattr(work, name) for name in (*names, *parameters)}
