"""The exporting tool as a module, and total work of a block."""

from types import ModuleType
from typing import Any

from script import script


def tool() -> ModuleType:
    """`tools/export_blocks.py`; needs transformers."""
    return script("tools/export_blocks.py")


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
    names = ("saved_eager_bytes", "saved_fused_bytes", "saved_operand_bytes", "input_bytes")
    parameters = ("parameters_split", "parameters_whole", "parameters_expert")
    return found | {name: getattr(work, name) for name in (*names, *parameters)}
