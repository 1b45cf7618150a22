"""`autopar plan`: capture a model without memory, choose how to split it, explain and write the plan."""

import os
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.model_argument import Hidden, Json, Layers, ModelArgument, is_factory
from autopar.cli.output import console, print_json, print_sections, progress
from autopar.ir.cluster import ClusterSpec
from autopar.ir.explanation import sections
from autopar.ir.plan import Degrees, Plan
from autopar.models import ResolvedModel, resolve_model
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
    with progress(f"building {model} without memory") as say:
        batch = None if is_factory(model) else (degrees.micro_batch or 1) * degrees.num_micro_batches
        found = resolve_model(model, layers=layers, hidden=hidden, seq_len=options.seq_len, batch=batch)
        say("capturing and choosing labels")
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


def _decided(found: ResolvedModel, cluster: ClusterSpec, degrees: Degrees, options: PlanOptions) -> Plan:
    from autopar.degrees import resolve_degrees
    from autopar.planning import make_plan
    from autopar.trace.capture import input_names
    from autopar.trace.trace import batch_and_sequence

    if found.kind == "factory":  # its inputs are one rank's batch, and decide what the options leave open
        local_batch, _ = batch_and_sequence(input_names(found.model, found.example_inputs))
        degrees = resolve_degrees(options.wish(), cluster.num_devices, local_batch, global_batch=options.global_batch)
    _, decided = make_plan(found.model, cluster, found.example_inputs, degrees, name=found.name)
    return decided
