"""What narrows the search of `autopar plan`: ``--fix``, ``--forbid``, and the options that name one degree each."""

from collections.abc import Sequence
from typing import Any

from autopar.errors import InputError, PlanError, Problem
from autopar.planning.options import PlanOptions, flag

_WORD = {"dp": "dp_shard"}  # the option's name and the search's


def narrowing(options: PlanOptions, fix: Sequence[str], forbid: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The words that are fixed and those that are forbidden, each with its values. ``--tp 8`` is ``--fix tp=8``.

    Raises `InputError` or `PlanError` with everything that cannot be used.
    """
    fixed, forbidden = _pairs("--fix", fix), _pairs("--forbid", forbid)
    wish = options.wish()
    runs = wish.pop("accumulate", 1)
    if runs > 1 and wish.get("pp", 1) > 1:
        raise PlanError(
            f"--accumulate {runs} with --pp {wish['pp']}: several runs of a pipeline have a bubble each and save "
            "nothing; leave out --accumulate, or give --micro-batches, those of the whole step"
        )
    if "accumulate" in options.given():
        wish["micro_batches"] = runs * wish.get("micro_batches", 1)
    for name, value in wish.items():
        word = _WORD.get(name, name)
        if word in fixed:
            raise InputError(f"{flag(name)} and --fix {word}=... are the same wish; give one of them")
        fixed[word] = (value,)
    return fixed, forbidden


def default_global_batch(options: PlanOptions, num_devices: int, local_batch: int | None) -> int:
    """As many sequences as the options say a step has, else `local_batch` (1) for every device."""
    given = options.given()
    counts = [given[name] for name in ("micro_batches", "accumulate") if name in given]
    if not counts:
        return num_devices * int(given.get("micro_batch", local_batch or 1))
    ranks = max(1, num_devices // (given.get("pp", 1) * given.get("tp", 1)))
    product: int = ranks * int(given.get("micro_batch", 1))
    for count in counts:
        product *= count
    return product


def _pairs(option: str, given: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """``tp=4,8`` as the word and its values."""
    found: dict[str, tuple[Any, ...]] = {}
    problems = []
    for text in given:
        word, equals, values = text.partition("=")
        word = _WORD.get(word.strip(), word.strip()).replace("-", "_")
        if not equals or not word or not values.strip(" ,"):
            problems.append(Problem(path=f"{option} {text}", rule="must be word=value, such as tp=8 or zero=1,3"))
        elif word in found:
            problems.append(Problem(path=f"{option} {text}", rule=f"names {word} again; give {word}=first,second"))
        else:
            found[word] = tuple(_value(one.strip()) for one in values.split(",") if one.strip())
    if problems:
        raise InputError("the options cannot be used", problems)
    return found


def _value(text: str) -> int | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text
