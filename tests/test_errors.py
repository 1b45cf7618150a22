import pickle

import pytest

from autopar import errors
from autopar.errors import AutoparError, ClusterError, InputError, Problem, did_you_mean, nearest, short_repr


def test_one_tree() -> None:
    tree = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert AutoparError in tree
    assert all(issubclass(each, AutoparError) and each.__doc__ for each in tree)
    assert issubclass(InputError, ValueError)


@pytest.mark.parametrize(
    ("name", "choices", "expected"),
    [
        ("h10", ["h100", "a100"], "h100"),
        ("LLAMA3_8B", ["llama3-8b", "gpt2"], "llama3-8b"),
        ("zzz", ["h100"], None),
        ("x" * 1_000_000, ["h100"], None),
    ],
)
def test_nearest(name: str, choices: list[str], expected: str | None) -> None:
    assert nearest(name, choices) == expected


def test_did_you_mean_lists_the_choices_when_nothing_is_near() -> None:
    assert did_you_mean("zzz", ["b", "a"]) == "valid: a, b"


def test_message_has_every_problem_and_survives_pickling() -> None:
    problems = [
        Problem(path="a.b", value=3, rule="must be 4", suggestion="write 4"),
        Problem(path="c", rule="is required"),
    ]
    error = ClusterError("bad file", problems)
    assert str(error) == "bad file:\n  - a.b: must be 4; got 3 (write 4)\n  - c: is required"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.problems) == (ClusterError, str(error), error.problems)


def test_long_lists_and_values_are_cut() -> None:
    text = str(InputError("x", [Problem(path=str(i), rule="r") for i in range(200)]))
    assert text.endswith("... and 150 more")
    assert len(short_repr("y" * 10**7)) <= 80
    assert len(short_repr(10**100_000)) <= 80
