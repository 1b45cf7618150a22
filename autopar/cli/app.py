"""The `autopar` command: its commands, one per file, and what holds for all of them."""

from typing import Annotated

import typer

from autopar._version import __version__
from autopar.cli.calibrate import calibrate
from autopar.cli.capacity import capacity
from autopar.cli.clusters import clusters
from autopar.cli.command import register
from autopar.cli.coverage import coverage
from autopar.cli.doctor import doctor
from autopar.cli.estimate import estimate
from autopar.cli.models import models
from autopar.cli.plan import plan
from autopar.cli.report import report
from autopar.cli.trace import trace
from autopar.cli.validate import validate
from autopar.cli.verify import verify

app = typer.Typer(
    name="autopar",
    help="Split a PyTorch model over a cluster: decide, explain, and verify against one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autopar {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Exit status: 0 done; 1 verification failed, or a bug; 2 bad input; 3 no feasible plan."""


for command in (
    plan,
    report,
    estimate,
    coverage,
    verify,
    trace,
    validate,
    doctor,
    calibrate,
    capacity,
    models,
    clusters,
):
    register(app, command)
