"""The `autopar` command: its commands, one per file, and the options of all of them."""

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from autopar._version import __version__
from autopar.cli.command import register

HELP = """Find, explain and verify the fastest split of a PyTorch model over a cluster.

Try: autopar plan gpt2 --cluster 4xcpu --layers 2 --hidden 64

Exit status: 0 done; 1 a check or a rank failed, or a bug; 2 wrong input; 3 no plan fits the devices' memory."""
# each is the function of its name in the module of its name
COMMANDS = (
    "plan",
    "tune",
    "report",
    "status",
    "checkpoint",
    "estimate",
    "coverage",
    "verify",
    "trace",
    "validate",
    "doctor",
    "calibrate",
    "capacity",
    "models",
    "clusters",
)


def app_of(words: Sequence[str] = ()) -> typer.Typer:
    """The command line with all commands, or with that alone which `words` begin with: it need not wait for others."""
    if not words or not {"-h", "--help"}.isdisjoint(words):
        from typer import rich_utils  # with a parser of Markdown

        # else 80 columns do not hold the longest option
        rich_utils.STYLE_OPTIONS_TABLE_PADDING = (0, 1, 0, 0)  # type: ignore[assignment]
    app = typer.Typer(
        name="autopar",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in [name for name in COMMANDS if name in words[:1]] or COMMANDS:
        register(app, getattr(import_module(f"autopar.cli.{name}"), name))
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autopar {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The options of `autopar` itself. `HELP` is the text of ``autopar --help``."""
