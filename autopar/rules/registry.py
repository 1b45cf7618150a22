"""The registry of operator rules: one entry per operator, duplicates refused.

Ours are written at import, by `rule`; a user's own by `register_rule`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from autopar._torch.private import overloads_of
from autopar.errors import RuleError
from autopar.rules.pattern_check import check_pattern
from autopar.rules.rule import Call, Rule, parse, whole_rule
from autopar.rules.singular import even_factors

RuleFunction = Callable[[Call], Rule]
_RULES: dict[Any, RuleFunction] = {}
_OF_USERS: set[Any] = set()  # operators whose rules users have registered


@dataclass(frozen=True, slots=True)
class Pattern:
    """A rule that one line of factor notation states; equal patterns are the same rule."""

    text: str
    whole: str = ""
    additive: tuple[int, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    flops: Callable[..., float] | None = None

    def __call__(self, call: Call) -> Rule:
        return parse(self.text, call, whole=self.whole, additive=self.additive, linear=self.linear, flops=self.flops)


def rule(*targets: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function of the call as the rule of `targets`. Raises `RuleError` on a duplicate."""

    def register(function: RuleFunction) -> RuleFunction:
        for target in targets:
            if target in _RULES:
                raise RuleError(f"operator {target} already has a rule; remove one of the two")
            _RULES[target] = function
        return function

    return register


def register_rule(
    target: Any,
    rule: str | RuleFunction,
    *,
    whole: str = "",
    additive: Sequence[int] = (),
    linear: Sequence[Sequence[int]] = (),
    flops: Callable[..., float] | None = None,
) -> None:
    """Tell autopar how an operator of your own may be split over ranks.

    Registering the same rule again does nothing. `autopar.prove_rule` shows that a rule is correct.

    Args:
        target: The operator: ``torch.ops.mine.scale``, or the result of `torch.library.custom_op`.
        rule: A line of factor notation such as ``"b s d, d -> b s d"`` (docs/adding_an_operator.md), or a function from
            the call to a `Rule`.
        whole: The factors that must not be split, separated by spaces.
        additive: The operands that are added to the result, such as a bias, by position.
        linear: Sets of operand positions. The operator is linear in the operands of one set together.
        flops: A function from the sizes of the factors to the FLOP of the forward pass. Without it, only memory traffic
            is priced.

    Raises:
        RuleError: The line is malformed, names operands that the operator does not have, or the operator has another
            rule already.

    Example:
        >>> @torch.library.custom_op("registry_example::scale", mutates_args=())
        ... def scale(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ...     return x * factor
        >>> autopar.register_rule(scale, "... n, n -> ... n", linear=[[0], [1]])
    """
    overload = operator_of(target)
    if isinstance(rule, str):
        groups = tuple(tuple(group) for group in linear)
        operands = {*additive, *(k for group in groups for k in group)}
        check_pattern(rule, overload._schema, whole=whole.split(), operands=operands)
        rule = Pattern(rule, whole, tuple(additive), groups, flops)
    elif not callable(rule):
        raise RuleError(f"{overload}: a rule is a line of factor notation or a function of the call, not {rule!r}")
    elif whole or additive or linear or flops:
        raise RuleError(f"{overload}: a rule given as a function states whole, additive, linear and flops itself")
    load_families()
    known = _RULES.setdefault(overload, rule)
    if known != rule:
        shown = f": {known.text!r}" if isinstance(known, Pattern) else ""
        raise RuleError(
            f"operator {overload} already has a rule{shown}; an operator has one rule, so leave this one out"
        )
    _OF_USERS.add(overload)


def has_rules_of_users() -> bool:
    """Whether a user has registered a rule, so that labels depend on code that autopar does not know."""
    return bool(_OF_USERS)


def operator_of(target: Any) -> Any:
    """The overload that a captured graph calls: an overload, an operator's only one, or that of a custom operator."""
    overloads = overloads_of(target)
    if not overloads:
        raise RuleError(
            f"{target!r} is no operator; pass torch.ops.<namespace>.<name>, or the result of torch.library.custom_op. "
            "A plain function needs no rule: it is traced through"
        )
    if len(overloads) > 1:
        raise RuleError(f"{target} has several overloads; name the one that your model calls: {', '.join(overloads)}")
    return next(iter(overloads.values()))


@cache
def load_families() -> None:
    """Import every rule family once; a new file in this folder is found by itself."""
    import autopar.rules.families as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def registered() -> tuple[Any, ...]:
    """Every operator with a rule."""
    load_families()
    return tuple(_RULES)


def has_rule(target: Any) -> bool:
    """Whether a rule is registered for an operator."""
    load_families()
    return target in _RULES


def rule_for(call: Call) -> Rule:
    """The rule of a call. Raises `RuleError` for an operator without one, or a call its rule does not cover."""
    load_families()
    function = _RULES.get(call.target)
    if function is None:
        raise RuleError(f"operator {call.target} has no rule; see autopar.register_rule")
    base = function(call)
    even = even_factors(call, base)
    return replace(base, even=base.even | even) if even else base


def rule_of(call: Call) -> Rule:
    """The rule of a call; an operator without one, or a call its rule does not cover, is whole."""
    try:
        return rule_for(call)
    except RuleError:
        return whole_rule(call)
