"""Operators that torch has under a second name, such as `multiply` for `mul`, get the name that rules know."""

from collections.abc import Iterator
from typing import Any

from torch import fx

from autopar._torch.operators import aten

# torch's own operator, and the names that call it
_NAMES = """
    abs:absolute acos:arccos acosh:arccosh asin:arcsin asinh:arcsinh atan:arctan atan2:arctan2 atanh:arctanh
    cat:concat,concatenate clamp:clip digamma:special_digamma,special_psi div:divide,true_divide erf:special_erf
    erfc:special_erfc erfinv:special_erfinv exp2:special_exp2 expm1:special_expm1 ge:greater_equal gt:greater
    le:less_equal lgamma:special_gammaln log1p:special_log1p logit:special_logit logsumexp:special_logsumexp lt:less
    matmul:linalg_matmul mul:multiply ne:not_equal neg:negative outer:ger sigmoid:special_expit
    sinc:special_sinc sub:subtract trunc:fix
"""


def _overloads() -> Iterator[tuple[Any, Any]]:
    for op, names in (line.split(":") for line in _NAMES.split()):
        for name in names.split(","):
            packet = getattr(aten, name)
            for overload in packet.overloads():
                if "out" not in overload and overload in getattr(aten, op).overloads():
                    yield getattr(packet, overload), getattr(getattr(aten, op), overload)


ALIASES = {aten.max.other: aten.maximum.default, aten.min.other: aten.minimum.default} | dict(_overloads())
_FILLS = {aten.zero.default: aten.zeros_like.default, aten.fill.Scalar: aten.full_like.default}


def one_name(graph: fx.Graph) -> None:
    """Replace second names by torch's own operators, and values that are overwritten by new ones."""
    plain = ALIASES | _FILLS
    for node in graph.nodes:
        if node.target in plain:
            node.target = plain[node.target]
