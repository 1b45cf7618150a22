"""Whether a model reads a value only to check it: in an ``assert``, or in the test of an ``if`` that may raise.

The checks of `torch.distributions` are off in a trace, which has no values.
"""

import ast
import linecache
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

from torch.distributions import Distribution

from autopar.capture.export.source_lines import OURS, TORCH

_BETWEEN = (OURS, *(TORCH + name for name in ("overrides.py", "_tensor.py", "_jit_internal.py")))
_Place = tuple[tuple[int, int], tuple[int, int]]  # lines and columns of the first and the last character
_CHECKS = ("torch._assert", "torch._check")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """A read of a check. `passes` is the truth that raises nothing; None if it is not known."""

    passes: bool | None
    is_number: bool  # whether the value is a part of an expression, such as a comparison


def check_that_reads() -> _Check | None:
    """The check for which the innermost code of a model, or of torch, reads a value. None if it reads for more."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    first, last, start, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    place = ((first or 0, start or 0), (last or 0, end or 0))
    for statement, test, passes in _tests(frame.f_code.co_filename):
        if place == _place(statement) or _has(test, place):
            leaves = list(_leaves(test, passes))
            inside = [(leaf, wanted) for leaf, wanted in leaves if _has(leaf, place)]
            wanted = {wanted for _, wanted in inside or leaves}
            is_number = bool(inside) and place != _place(inside[0][0])
            return _Check(passes=wanted.pop() if len(wanted) == 1 and not is_number else None, is_number=is_number)
    return None


@cache
def _tests(file: str) -> tuple[tuple[ast.AST, ast.expr, bool], ...]:
    """The checks of a file: the whole of each, its test, and the truth of the test that raises nothing."""
    tests = list[tuple[ast.AST, ast.expr, bool]]()
    for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
        if isinstance(node, ast.Assert):
            tests.append((node, node.test, True))
        elif isinstance(node, ast.If):
            ways = (node.body, False), (node.orelse, True)
            ends = [passes for body, passes in ways if body and isinstance(body[-1], ast.Raise)]
            tests += [(node, node.test, passes) for passes in ends[:1]]
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).startswith(_CHECKS):
            tests.append((node, node.args[0], True))
    return tuple(tests)


def _leaves(test: ast.expr, passes: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a test that `and`, `or` and `not` join, with the truth that makes the test pass."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not passes)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _leaves(value, passes)
    else:
        yield test, passes


def _place(node: ast.AST) -> _Place:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _has(node: ast.expr, place: _Place) -> bool:
    begin, end = _place(node)
    return begin <= place[0] and place[1] <= end


def unchecked_distributions() -> AbstractContextManager[object]:
    """A context in which distributions do not check their arguments, as with ``validate_args=False``."""
    return patch.object(Distribution, "_validate_args", False)
