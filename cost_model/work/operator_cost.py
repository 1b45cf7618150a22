"""Work of one operator on one rank: FLOP, memory traffic in bytes, and the operands saved for the backward pass.

Training costs three times the forward pass, because the gradient of each of a product's two operands is one product
(Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", appendix). Memory traffic
counts every operand and the output once per pass. Views move nothing.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeVar

from autopar.ir.program import StateInfo
from autopar.rules.rule import Call, Rule, Slot, TensorInfo

_V = TypeVar("_V")
VIEWS = frozenset((
    "alias", "as_strided", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim", "narrow", "permute",
    "reshape", "select", "slice", "squeeze", "t", "transpose", "unflatten", "unfold", "unsqueeze", "view", "view_as",
))  # fmt: skip

EXPERT_ORDER = "expert_order"
EXPERT_PRODUCTS = ("grouped_mm", "expert_product")  # each row meets the matrix of its own expert


def target_name(target: Any) -> str:
    """An operator's name without namespace and overload: ``linear`` for ``aten.linear.default``."""
    return str(target).split(".")[1] if "." in str(target) else str(target)


def info_bytes(info: TensorInfo) -> float:
    return float(prod(info.shape) * info.dtype.itemsize)


def passes_of(call: Call, rule: Rule) -> float:
    """The work of a step for the work of a forward pass. A product has one more for each operand with a gradient."""
    if not call.output.differentiable:
        return 1.0
    return 1.0 + (sum(info.differentiable for info in call.operands[:2]) if rule.flops else 2)


def is_view(call: Call) -> bool:
    return target_name(call.target) in VIEWS


def forward_flops(rule: Rule, call: Call, sizes: Mapping[str, _V]) -> _V | float:
    """Forward FLOP of an operator: by its rule, or by torch's own count if no rule is known.

    `sizes` are the sizes of the rule's factors on one rank, numbers or expressions.
    """
    if not rule.known or rule.flops is None:
        return _counted_flops(call)
    by_rule: Any = rule.flops  # a formula works on expressions as on numbers
    flops: _V | float = by_rule(sizes)
    return flops


def local_flops(rule: Rule, degrees: Mapping[str, float]) -> float:
    """Forward FLOP of one rank by the rule alone, if factors are divided by `degrees`; 0 without a formula."""
    return float(rule.flops(local_sizes(rule, degrees))) if rule.flops else 0.0


def local_sizes(rule: Rule, degrees: Mapping[str, float]) -> dict[str, Any]:
    """Sizes of the rule's factors on one rank."""
    return {f: size / degrees[f] if f in degrees else size for f, size in rule.sizes.items()}


def _counted_flops(call: Call) -> float:
    """Forward FLOP by torch's own count; 0 if torch has no formula for the operator.

    torch does not count products grouped by expert. There a token is multiplied by the (k, n) matrix of its own expert.
    """
    import torch
    from torch.fx.node import map_aggregate
    from torch.utils.flop_counter import FlopCounterMode

    if target_name(call.target).lstrip("_") in EXPERT_PRODUCTS:
        return 2.0 * prod(call.operands[0].shape) * call.operands[1].shape[-1]
    tensors = [torch.empty(info.shape, dtype=info.dtype, device="meta") for info in call.operands]

    def filled(value: Any) -> Any:
        return tensors[value.index] if isinstance(value, Slot) else value

    args, kwargs = map_aggregate(call.args, filled), map_aggregate(dict(call.kwargs), filled)
    with FlopCounterMode(display=False) as counter:
        try:
            call.target(*args, **kwargs)
        except (NotImplementedError, RuntimeError):  # no meta kernel: its work is unknown
            return 0.0
    return float(counter.get_total_flops())


def saved_operands(call: Call, rule: Rule) -> tuple[int, ...]:
    """Positions of the operands that the backward pass needs.

    If an operator is linear in all differentiable operands together, only the other operands are saved. Otherwise every
    floating-point operand is saved.
    """
    if not call.output.differentiable or is_view(call):
        return ()
    flows = frozenset(k for k, operand in enumerate(call.operands) if operand.differentiable)
    if any(flows <= group for group in rule.linear):
        return tuple(k for k in range(len(call.operands)) if k not in flows)
    return tuple(k for k, operand in enumerate(call.operands) if operand.dtype.is_floating_point)


def parameter_state_bytes(infos: Sequence[StateInfo]) -> float:
    """Mean bytes per element for parameter, gradient and Adam's state: 16 both in float32 and in mixed precision.

    A frozen parameter has only its own bytes.

    Rajbhandari et al. 2020, "ZeRO", section 3.1: 2 + 2 + 12 in mixed precision; 4 + 4 + 8 in float32.
    """
    each = ((2 if i.dtype.itemsize > 4 else 1) * 16.0 if i.requires_grad else float(i.dtype.itemsize) for i in infos)
    return sum(each) / max(1, len(infos))
