"""The registry of operator rules: one entry per operator, written at import, duplicates refused."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import RuleError
from autopar.rules.rule import Call, Emit, Rule, parse, whole_rule

RuleFunction = Callable[[Call], Rule]
_RULES: dict[Any, RuleFunction] = {}


def rule(*targets: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function of the call as the rule of `targets`. Raises `RuleError` on a duplicate."""

    def register(function: RuleFunction) -> RuleFunction:
        for target in targets:
            if target in _RULES:
                raise RuleError(f"operator {target} already has a rule; remove one of the two")
            _RULES[target] = function
        return function

    return register


def pattern(
    target: Any,
    text: str,
    *,
    whole: str = "",
    additive: Sequence[int] = (),
    linear: Sequence[Sequence[int]] = (),
    flops: Callable[..., float] | None = None,
    emit: Emit | None = None,
) -> None:
    """Register a rule that one line of factor notation states, for example ``"... i, o i[, o] -> ... o"``."""

    def from_text(call: Call) -> Rule:
        return parse(text, call, whole=whole, additive=additive, linear=linear, flops=flops, emit=emit)

    rule(target)(from_text)


def load_families() -> None:
    """Import every rule family once; a new file in this folder is found by itself."""
    import autopar.rules.families as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def registered() -> tuple[Any, ...]:
    """Every operator with a rule."""
    load_families()
    return tuple(_RULES)


def rule_of(call: Call) -> Rule:
    """The rule of a call; an operator without one, or a call its rule does not cover, is whole."""
    load_families()
    function = _RULES.get(call.target)
    if function is None:
        return whole_rule(call)
    try:
        return function(call)
    except RuleError:
        return whole_rule(call)
