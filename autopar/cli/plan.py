"""`autopar plan`: capture a model without memory, choose how to split it, explain and write the plan."""

import os
from pathlib import Path
from typing import Annotated

import typer

from autopar.capture_cache import CapturedModel, cache_folder, captured_model
from autopar.cli.model_argument import Hidden, Json, Layers, ModelArgument
from autopar.cli.output import console, print_json, print_sections, progress
from autopar.ir.cluster import ClusterSpec
from autopar.ir.explanation import sections
from autopar.ir.plan import Degrees, Plan
from autopar.options import PlanOptions


def plan(
    model: ModelArgument,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="4xcpu, 8xh100, ..., a YAML file, or detect.", show_default=False)
    ],
    options: PlanOptions,
    layers: Layers = None,
    hidden: Hidden = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan there as JSON.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Decide how to split MODEL over a cluster, and explain it. Needs no GPU and no memory for the weights."""
    spec = ClusterSpec.parse(cluster)
    degrees = options.degrees(spec.num_devices)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # remarks about configs are no help here
    with progress(f"capturing {model} without memory") as say:
        found = captured_model(model, folder=cache_folder(), layers=layers, hidden=hidden, seq_len=options.seq_len)
        say("choosing labels")
        decided = _decided(found, spec, degrees, options)
    if out is not None:
        decided.save(out)
    if as_json:
        print_json(decided.to_dict())
        return
    stdout = console()
    print_sections(sections(decided), stdout)
    for note in (*found.notes, *(f"assumed: {assumption}" for assumption in spec.assumptions)):
        stdout.print(note, markup=False)
    if out is not None:
        stdout.print(f"written to {out}", markup=False)


def _decided(found: CapturedModel, cluster: ClusterSpec, degrees: Degrees, options: PlanOptions) -> Plan:
    from autopar.degrees import resolve_degrees
    from autopar.planning import label_plan, program_for

    if found.local_batch is not None:  # a factory's inputs are one rank's batch, and decide what the options leave open
        wish, world = options.wish(), cluster.num_devices
        degrees = resolve_degrees(wish, world, found.local_batch, global_batch=options.global_batch)
    return label_plan(program_for(found.capture, degrees), cluster, degrees, found.name)
