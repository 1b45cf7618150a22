"""What can be told of a pattern before any shape is known, for patterns that users write."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from autopar.errors import RuleError, did_you_mean
from autopar.rules.rule import parse_operand, split_operands


def check_pattern(text: str, schema: Any, *, whole: Sequence[str], operands: Collection[int]) -> None:
    """Refuse a pattern that cannot fit the operator. `operands` are the numbers that `additive` and `linear` name."""

    def refuse(what: str) -> RuleError:
        return RuleError(f"rule {text!r} of {schema}: {what}")

    if text.count("->") != 1:
        raise refuse("write operands, '->' and the output, for example '... i, o i -> ... o'")
    left, right = text.split("->")
    if "," in right or "[" in right:
        raise refuse("an operator has exactly one output")
    optional = left.count("[")
    if left.count("]") != optional or left.count("[,") != optional or "," in left[left.find("]") :] * bool(optional):
        raise refuse("an operand that may be missing is written '[, o]', behind the others")
    terms = [*split_operands(left), right.strip()]
    factors = [_factors(term, refuse) for term in terms]
    inputs, output = [f for operand in factors[:-1] for f in operand], factors[-1]
    unknown = [f for f in output if f not in inputs and f not in whole]
    if unknown:
        raise refuse(
            f"{unknown[0]!r} stands in the output only; a rank cannot make its part of it. Name it in an operand, or "
            f"in whole={unknown[0]!r}"
        )
    named = sorted({*inputs, *output} - {"..."})
    for factor in whole:
        if factor not in named:
            raise refuse(f"whole names {factor!r}, which is no factor of it; {did_you_mean(factor, named)}")
    _check_schema(schema, len(terms) - 1, operands, refuse)


def _factors(term: str, refuse: Any) -> list[str]:
    """The names in one operand. Raises what `refuse` makes of a malformed one."""
    if term.count("(") != term.count(")") or any(
        term[: k + 1].count("(") - term[: k + 1].count(")") not in (0, 1) for k in range(len(term))
    ):
        raise refuse(f"parentheses of {term!r} do not match; '(a b)' is one dimension made of two factors")
    names: list[str] = []
    for dim in parse_operand(term):
        names += ["..."] if dim is None else dim
    for name in names:
        if name != "..." and not name.isidentifier():
            raise refuse(
                f"{name!r} is no name of a factor; use letters, digits and '_', and 1 for a dimension of size 1"
            )
        if names.count(name) > 1:
            raise refuse(f"{name!r} stands twice in {term!r}; give the two dimensions names of their own")
    return names


def _check_schema(schema: Any, count: int, operands: Collection[int], refuse: Any) -> None:
    if schema.is_mutable:
        raise refuse("the operator changes an operand in place; register one that returns a new tensor")
    if len(schema.returns) != 1 or not isinstance(schema.returns[0].type, torch.TensorType):
        raise refuse("a rule is for an operator that returns one tensor")
    kinds = [str(argument.type) for argument in schema.arguments]
    required, most = kinds.count("Tensor"), sum(kind in ("Tensor", "Optional[Tensor]") for kind in kinds)
    takes_list = any("List[" in kind and "Tensor" in kind for kind in kinds)
    if not takes_list and not (required <= count <= most):
        wanted = f"{required}" if required == most else f"{required} to {most}"
        raise refuse(f"it names {count} operands, the operator takes {wanted} tensors")
    wrong = sorted(k for k in operands if not 0 <= k < count)
    if wrong:
        raise refuse(f"operand {wrong[0]} does not exist; the {count} operands count from 0")
