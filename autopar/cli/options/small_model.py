"""Sizes of a model that runs on ranks of this machine: the sizes in the plan file, or small ones."""

from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.options.checks import MAX_RANKS, refuse_options
from autopar.errors import InputError, PlanError, Problem
from autopar.ir.explanation import sizes_in_words
from autopar.ir.plan import Plan
from autopar.models.load import is_factory
from autopar.planning.degrees import resolve_degrees
from autopar.planning.options import PlanOptions
from autopar.presets.models import model_names, model_preset

SMALL_LAYERS, SMALL_HIDDEN, SMALL_HIDDEN_BY_3, SMALL_SEQ_LEN = 2, 64, 96, 32
WorldSize = Annotated[int, typer.Option("--world-size", "-n", help="Ranks to start on this machine.")]
LocalBatch = Annotated[
    int | None, typer.Option(help="Sequences of one data-parallel rank in one step.", show_default=False)
]


def check_numbers(**numbers: int | None) -> None:
    """Raise `InputError` naming every option that is below 1, and more ranks than one machine is asked to run."""
    problems = [
        Problem(path="--" + name.replace("_", "-"), value=value, rule="must be at least 1")
        for name, value in numbers.items()
        if value is not None and value < 1
    ]
    if (numbers["world_size"] or 0) > MAX_RANKS:
        rule = f"must be at most {MAX_RANKS} ranks on one machine"
        problems.append(Problem(path="--world-size", value=numbers["world_size"], rule=rule))
    refuse_options(problems)


def wish_and_sizes(
    model: str,
    world_size: int,
    options: PlanOptions,
    plan: Path | None,
    *,
    layers: int | None,
    hidden: int | None,
    batch: int | None,
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The degrees that were asked for, None with a plan file, and all sizes of the model."""
    given = {"layers": layers, "hidden": hidden, "seq_len": options.seq_len, "batch": batch}
    if plan is not None:
        return None, given | _sizes_of_plan(plan, model, world_size, options, batch)
    return options.wish(), given | _small_sizes(model, world_size, options, given)


def _sizes_of_plan(
    path: Path, model: str, world_size: int, options: PlanOptions, batch: int | None
) -> dict[str, int | None]:
    """Batch and sequence that the plan was made for, unless they were given."""
    options.refuse_beside_plan()
    found = Plan.load(path)
    if model.lower() in model_names() and found.model not in ("", model_preset(model).name):
        raise PlanError(f"plan file {path} was made for model {found.model}, not {model}; plan again for {model}")
    if found.degrees.world_size != world_size:
        raise PlanError(
            f"plan file {path} is for {found.degrees.world_size} ranks ({sizes_in_words(found)}), not {world_size}; "
            f"use --world-size {found.degrees.world_size}, or plan again for {world_size}"
        )
    if is_factory(model):
        return {}
    return {"seq_len": found.sequence, "batch": found.degrees.local_batch if batch is None else batch}


def _small_sizes(model: str, world_size: int, options: PlanOptions, sizes: dict[str, Any]) -> dict[str, int]:
    """Small sizes for the options that were left open; the degrees divide them."""
    if is_factory(model):
        if options.global_batch is not None:
            raise InputError(f"--global-batch: a factory decides its own sizes; change {model} instead")
        return {}
    if sizes["batch"] is None:
        degrees = options.degrees(world_size)
    else:
        degrees = resolve_degrees(options.wish(), world_size, sizes["batch"], global_batch=options.global_batch)
    hidden = SMALL_HIDDEN if degrees.tp % 3 else SMALL_HIDDEN_BY_3
    small = {"layers": SMALL_LAYERS, "hidden": hidden, "seq_len": SMALL_SEQ_LEN if degrees.tp % 3 else 48}
    small["batch"] = degrees.local_batch
    return {name: value for name, value in small.items() if sizes[name] is None}
