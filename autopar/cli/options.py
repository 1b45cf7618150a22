"""Arguments and options that several commands have, declared once, and the checks of their values."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.errors import InputError, PlanError, Problem
from autopar.files.atomic import NOT_WRITABLE, is_writable
from autopar.planning.options import PlanOptions

MAX_RANKS = 64
SEARCH = "The search"  # a panel of the help
_WORD = {"dp": "dp_shard"}  # the option's name and the search's


def option(help_text: str, *names: str, panel: str | None = None) -> Any:
    """An option whose default, if there is one, stands in its text."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False)


def big_number(text: str) -> float:
    """A number, which may end with K, M, B or T: 300B is 300 billion."""
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    try:
        return float(text) if factor is None else factor * float(text[:-1])
    except ValueError:
        raise typer.BadParameter(f"{text[:80]!r} is no number such as 15e12, 300B or 1.5T") from None


def positional(name: str, help_text: str) -> Any:
    return typer.Argument(metavar=name, help=help_text, show_default=False)


ModelArgument = Annotated[
    str,
    positional(
        "MODEL",
        "A preset such as llama3-8b (see `autopar models`), a transformers config.json, or "
        "package.module:factory or path/to/file.py:factory, a function that returns (model, example_inputs).",
    ),
]
ClusterOption = Annotated[
    str,
    option(
        "<n>x<device> such as 64xh100 or 4xcpu (see `autopar clusters`), a YAML file (see docs/clusters.md), or "
        "detect.",
        "--cluster",
        "-c",
    ),
]
Clusters = Annotated[
    list[str],
    option(
        "<n>x<device> such as 64xh100 or 4xcpu (see `autopar clusters`), a YAML file (see docs/clusters.md), or "
        "detect. Several clusters are compared.",
        "--cluster",
        "-c",
    ),
]
Layers = Annotated[int | None, option("Number of layers, for a preset or config. (default: the model's own)")]
Hidden = Annotated[int | None, option("Hidden size, for a preset or config. (default: the model's own)")]
Trains = Annotated[
    str,
    option(
        "Parameters to train: all, lora:r=16,targets=q_proj+v_proj (adapters by peft, all linear layers without "
        "targets), or frozen:embed_tokens (all but these modules). (default: all)"
    ),
]
Tokens = Annotated[
    float | None,
    typer.Option(
        help="Tokens of the whole run, such as 15e12, 300B or 1.5T. Adds days, money, energy.",
        parser=big_number, metavar="NUMBER", show_default=False,
    ),
]  # fmt: skip
Specialise = Annotated[
    bool,
    typer.Option(
        "--specialise",
        help="Capture branches on inputs as the example inputs take them. Training captures other branches too.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
WorldSize = Annotated[int, typer.Option("--world-size", "-n", help="Ranks to start on this machine.")]
LocalBatch = Annotated[int | None, option("Sequences of one data-parallel rank in one step.")]
Objective = Annotated[
    str,
    option(
        "The value to make small: time, cost, energy or memory. Cost and energy may use a part of the cluster. "
        "(default: time)",
        panel=SEARCH,
    ),
]
Fix = Annotated[
    list[str] | None,
    option(
        "Allowed values of a degree, such as tp=8 or zero=1,3. May be repeated. --tp 8 is short for --fix tp=8.",
        panel=SEARCH,
    ),
]
Forbid = Annotated[
    list[str] | None, option("Forbidden values of a degree, such as schedule=gpipe. May be repeated.", panel=SEARCH)
]
Seed = Annotated[int, option("Seed of Optuna's sampler. (default: 0)", panel=SEARCH)]
MeasuredOption = Annotated[
    Path | None,
    option(
        "Measured steps that correct the device profile: a CSV file (columns of `autopar validate`), or a trace "
        "of one step of the model (`autopar trace`)."
    ),
]
Profile = Annotated[
    Path | None,
    option("Device profile, a file of `autopar calibrate`. (default: the cluster's, else the shipped profile)"),
]


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


def default_global_batch(options: PlanOptions, num_devices: int, local_batch: int | None) -> int:
    """As many sequences as the options say a step has, else `local_batch` (1) for every device."""
    given = options.given()
    counts = [given[name] for name in ("micro_batches", "accumulate") if name in given]
    if not counts:
        return num_devices * int(given.get("micro_batch", local_batch or 1))
    ranks = max(1, num_devices // (given.get("pp", 1) * given.get("tp", 1) * given.get("cp", 1)))
    return prod([ranks, int(given.get("micro_batch", 1)), *counts])


def values_by_word(name: str, texts: Sequence[str] | None) -> dict[str, tuple[Any, ...]]:
    """The words and values of an option such as ``--fix tp=4,8``. Raises `InputError` with everything that is none."""
    values_of: dict[str, tuple[Any, ...]] = {}
    problems = []
    for text in texts or ():
        word, equals, values = text.partition("=")
        word = _WORD.get(word.strip(), word.strip()).replace("-", "_")
        if not equals or not word or not values.strip(" ,"):
            problems.append(Problem(path=f"{name} {text}", rule="must be word=value, such as tp=8 or zero=1,3"))
        elif word in values_of:
            rule = f"names {word} a second time; give all values at once, {word}=first,second"
            problems.append(Problem(path=f"{name} {text}", rule=rule))
        else:
            values_of[word] = tuple(_value(value.strip()) for value in values.split(",") if value.strip())
    refuse_options(problems)
    return values_of


def _value(text: str) -> int | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text
