"""A memo computes once, refuses functions with other inputs than its key; so do the caches of `functools`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.memo import Memo

ROOT = Path(__file__).parent.parent
ROOMS = ("autopar", "cost_model", "search", "runtime")
CACHES = {"cache", "lru_cache"}
BOUNDED = {"runtime/parameters/packed.py"}  # the last two tensors of a source


def test_it_computes_once_and_keeps_no_failure() -> None:
    memo, seen = Memo(), Seen()
    assert [memo(Seen.add, seen, 1), memo(Seen.add, seen, 2), memo(Seen.add, seen, 1)] == [1, 2, 1]
    assert seen.values == [1, 2]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            memo(divmod, 1, 0)
    assert len(memo) == 2


def test_a_key_has_the_function_and_the_object() -> None:
    memo, one, other = Memo(), Seen(), Seen()
    memo(Seen.add, one, 1)
    memo(Seen.add, other, 1)
    assert (one.values, other.values) == ([1], [1])
    assert memo(divmod, 7, 2) != memo(pow, 7, 2)


def test_a_function_with_other_inputs_is_refused() -> None:
    outside = 3
    with pytest.raises(AssertionError, match="inputs that the key lacks"):
        Memo()(lambda value: value + outside, 1)


def test_caches_of_functools_are_on_functions_of_modules() -> None:
    """Such a function has no other inputs than its arguments."""
    files = {path.relative_to(ROOT).as_posix(): path for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    found = {name: {*uses(ast.parse(path.read_text(encoding="utf-8")))} for name, path in files.items()}
    assert sum(True in each for each in found.values()) > 10
    assert {name for name, each in found.items() if False in each} == BOUNDED


def uses(tree: ast.Module) -> Iterator[bool]:
    """Whether each use of `functools.cache` and `functools.lru_cache` decorates a function of the module."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    decorators = {id(node) for each in functions for one in each.decorator_list for node in ast.walk(one)}
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "functools"]
    names = {alias.name for node in imports for alias in node.names} & CACHES
    for node in ast.walk(tree):
        is_name = isinstance(node, ast.Name) and node.id in names
        is_attribute = (
            isinstance(node, ast.Attribute) and node.attr in CACHES and ast.unparse(node.value) == "functools"
        )
        if is_name or is_attribute:
            yield id(node) in decorators


class Seen:
    def __init__(self) -> None:
        self.values: list[int] = []

    def add(self, value: int) -> int:
        self.values.append(value)
        return value
