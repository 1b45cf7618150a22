"""Checks of options that several commands have."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autopar.errors import InputError, PlanError, Problem
from autopar.files.atomic import NOT_WRITABLE, is_writable

MAX_RANKS = 64


def refuse_options(problems: Sequence[Problem]) -> None:
    """Raise `InputError` if there are problems."""
    if problems:
        raise InputError("the options cannot be used", problems)


def problems_of_ranks(ranks: int | None) -> list[Problem]:
    """The problems of ``--ranks``, which starts CPU ranks on this machine."""
    problems = []
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        problems.append(Problem(path="--ranks", value=ranks, rule=f"must be from 1 to {MAX_RANKS}"))
    if ranks is not None and "RANK" in os.environ:
        problems.append(Problem(path="--ranks", value=ranks, rule="must be left out under torchrun, which has ranks"))
    return problems


def problems_of_target(option: str, path: Path | None) -> list[Problem]:
    """The problem of a file to write, found before any work."""
    if path is None or is_writable(path):
        return []
    return [Problem(path=option, value=str(path), rule=NOT_WRITABLE)]


@contextmanager
def naming(plan: Path | str | None) -> Iterator[None]:
    """Say of which plan file a `PlanError` is. Errors of the model and of other options stay as they are."""
    try:
        yield
    except PlanError as error:
        if plan is not None and Path(plan).name not in str(error):
            error.args = (f"plan file {plan}: {error}",)
        raise
