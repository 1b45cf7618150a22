"""The texts of ``--fix`` and ``--forbid``, and the batch of a step if ``--global-batch`` is not given."""

from collections.abc import Sequence
from typing import Any

from autopar.cli.options.checks import refuse_options
from autopar.errors import Problem
from autopar.planning.options import PlanOptions

_WORD = {"dp": "dp_shard"}  # the option's name and the search's


def default_global_batch(options: PlanOptions, num_devices: int, local_batch: int | None) -> int:
    """As many sequences as the options say a step has, else `local_batch` (1) for every device."""
    given = options.given()
    counts = [given[name] for name in ("micro_batches", "accumulate") if name in given]
    if not counts:
        return num_devices * int(given.get("micro_batch", local_batch or 1))
    ranks = max(1, num_devices // (given.get("pp", 1) * given.get("tp", 1) * given.get("cp", 1)))
    product: int = ranks * int(given.get("micro_batch", 1))
    for count in counts:
        product *= count
    return product


def values_by_word(option: str, given: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The words and values of an option such as ``--fix tp=4,8``. Raises `InputError` with everything that is none."""
    values_of: dict[str, tuple[Any, ...]] = {}
    problems = []
    for text in given:
        word, equals, values = text.partition("=")
        word = _WORD.get(word.strip(), word.strip()).replace("-", "_")
        if not equals or not word or not values.strip(" ,"):
            problems.append(Problem(path=f"{option} {text}", rule="must be word=value, such as tp=8 or zero=1,3"))
        elif word in values_of:
            problems.append(
                Problem(
                    path=f"{option} {text}",
                    rule=f"names {word} a second time; give all values at once, {word}=first,second",
                )
            )
        else:
            values_of[word] = tuple(_value(one.strip()) for one in values.split(",") if one.strip())
    refuse_options(problems)
    return values_of


def _value(text: str) -> int | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text
