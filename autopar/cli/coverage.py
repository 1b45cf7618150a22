"""`autopar coverage`: the part of a model's work that a mesh splits, and the price of operators that stay whole."""

from math import prod
from typing import TYPE_CHECKING, Annotated

from autopar.cli.command import Answer
from autopar.cli.options import Hidden, Layers, ModelArgument, Specialise, option
from autopar.cli.output import console, print_ends, progress, table
from autopar.ir.cluster import ClusterSpec
from autopar.models.load import ResolvedModel, is_factory, resolve_model
from autopar.planning.options import PlanOptions
from autopar.words.numbers import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from autopar.cost_model.work.coverage import Coverage

DEFAULT_DEVICE = "h100"


def coverage(
    model: ModelArgument,
    options: PlanOptions,
    cluster: Annotated[
        str | None,
        option(
            "<n>x<device> such as 8xh100, a YAML file, or detect. (default: as many H100 as the degrees need)",
            "--cluster",
            "-c",
        ),
    ] = None,
    layers: Layers = None,
    hidden: Hidden = None,
    specialise: Specialise = False,
) -> Answer:
    """Show how much of MODEL's work is split, and the price of the operators that stay whole.

    Operators without a rule are computed whole on every rank. The last table names them. Needs no GPU.

    Example: autopar coverage llama3-8b --tp 8
    """
    given = options.given()
    wanted = prod(given.get(name, 1) for name in ("tp", "cp", "dp", "dp_replicate"))
    spec = ClusterSpec.parse(cluster or f"{wanted}x{DEFAULT_DEVICE}")
    degrees = options.degrees(spec.num_devices)
    with progress(f"building {model}") as on_progress:
        batch = None if is_factory(model) else degrees.local_batch
        built = resolve_model(model, layers=layers, hidden=hidden, seq_len=options.seq_len, batch=batch)
        on_progress("capturing and choosing labels")
        from autopar.planning.fixed import coverage as run

        covered = run(
            built.model,
            spec,
            example_inputs=built.example_inputs,
            plan=options.wish(),
            global_batch=options.global_batch,
            loss_fn=built.loss_fn,
            specialise=specialise,
        )
    data = {"model": built.name, "cluster": spec.name, **covered.to_dict()}
    return Answer(data=data, show=lambda: _show(built, spec, covered))


def _show(model: ResolvedModel, cluster: ClusterSpec, covered: "Coverage") -> None:
    _show_operators(model.name, cluster, covered)
    print_ends([*model.notes, *(f"assumed: {assumption}" for assumption in cluster.assumptions)])


def _show_operators(name: str, cluster: ClusterSpec, covered: "Coverage") -> None:
    from autopar.cost_model.work.coverage import grouped_dims

    out = console()
    mesh = " × ".join(f"{dim} {degree}" for dim, degree in covered.mesh.items()) or "one rank"
    out.print(f"{name} on {mesh} of {cluster.name}\n", style="bold")
    dims = grouped_dims(covered.mesh)
    for dim in dims:
        flops, moved = covered.split_flops(dim), covered.split_bytes(dim)
        out.print(f"{dim} splits {flops:.1%} of FLOP and {moved:.1%} of bytes moved")
    out.print()
    columns = ("operator", "calls", "without rule", "GFLOP", *(f"split on {dim}" for dim in dims))
    rows = []
    for o in sorted(covered.operators, key=lambda o: (-o.flops, -o.num_bytes)):
        split, whole = (o.split_flops, o.flops) if o.flops else (o.split_bytes, o.num_bytes)
        parts = [f"{split[dim] / whole:.1%}" if whole else "" for dim in dims]
        work = f"{o.flops / 1e9:,.1f}" if o.flops else ""
        rows.append((o.operator, str(o.num_calls), str(o.num_without_rule or ""), work, *parts))
    out.print(table(columns, rows, right=columns[1:]))
    if not covered.whole:
        out.print("\nEvery operator with notable work is split.")
        return
    out.print(f"\nOperators that stay whole (one rank computes {readable_seconds(covered.seconds)} in a step)")
    columns = ("whole on", "operator", "where", "times", "rule", "time", "memory")
    rows = []
    for w in covered.whole:
        price = (readable_seconds(w.seconds), readable_bytes(w.kept_bytes))
        rows.append((w.mesh_dim, w.operator, w.where, str(w.num_calls), "yes" if w.has_rule else "no", *price))
    out.print(table(columns, rows, right=("times", "time", "memory")))
