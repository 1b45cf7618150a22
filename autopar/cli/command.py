"""How a function becomes a command: the options of `PlanOptions` in its signature, and errors as messages."""

import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from autopar.cli.options import Json
from autopar.cli.output import console, own_stdout, print_json
from autopar.errors import AutoparError, CaptureError, InfeasibleError, RankError, SearchError, VerificationError
from autopar.planning.options import PlanOptions, command_options, flag

FAILED, BAD_INPUT, INFEASIBLE, INTERRUPTED = 1, 2, 3, 130
_CHECKS = (RankError, VerificationError, SearchError)
_STATUS = ((InfeasibleError, INFEASIBLE), (_CHECKS, FAILED), (AutoparError, BAD_INPUT))
_PANEL = "The plan"
_SEARCHED = f"{_PANEL} (the search chooses what is not given)"
_Traceback = Annotated[
    bool, typer.Option("--traceback", help="Show where an error was raised. AUTOPAR_DEBUG=1 does the same.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command has to say: its data, how they are printed for people, and the exit status."""

    data: Any  # of --json
    show: Callable[[], None]
    status: int = 0


def register(app: typer.Typer, function: Callable[..., Answer | None]) -> None:
    """Add a function as a command of its own name. A parameter `options: PlanOptions` becomes one option per field.

    A function that returns an `Answer` gets the option ``--json``.
    """
    signature = inspect.signature(function, eval_str=True)
    params, answers = signature.parameters, signature.return_annotation is Answer
    takes_options = "options" in params
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in params.items() if name != "options"]
    if answers and "as_json" not in params:
        parameters.append(_parameter("as_json", Json, False))
    if takes_options:
        parameters += _option_parameters(is_search="fix" in params)
    parameters.append(_parameter("traceback", _Traceback, False))

    def run(**given: Any) -> None:
        wants_traceback = given.pop("traceback") or os.environ.get("AUTOPAR_DEBUG", "") not in ("", "0")
        # remarks of libraries about things that are on purpose; ranks that a command starts inherit this
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with _errors_as_messages(wants_traceback), own_stdout():
            if takes_options:
                given["options"] = PlanOptions(**{name: given.pop(name) for name in command_options()})
            as_json = given["as_json"] if "as_json" in params else given.pop("as_json", False)
            answer = function(**given)
            if answer is not None:
                print_json(answer.data) if as_json else answer.show()
                if answer.status:
                    raise typer.Exit(answer.status)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    # one line for each paragraph, so that the help wraps it to the terminal's width
    run.__doc__ = "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(function) or "").split("\n\n"))
    app.command(name=function.__name__)(run)


def _option_parameters(*, is_search: bool) -> list[inspect.Parameter]:
    panel = _SEARCHED if is_search else _PANEL
    params = []
    for field in command_options().values():
        name, place, metavar = flag(field.name), panel, None
        if "bool" in str(field.type):  # its two long names would squeeze the texts of all options in the panel
            name, place, metavar = f"{name}/--no-{name[2:]}", f"{_PANEL}, yes or no", ""
        default = "" if is_search and field.metadata["is_searched"] else field.metadata["default"]
        text = f"{field.metadata['help']} (default: {default})" if default else field.metadata["help"]
        option = typer.Option(name, help=text, rich_help_panel=place, show_default=False, metavar=metavar)
        params.append(_parameter(field.name, Annotated[field.type, option], None))
    return params


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


@contextmanager
def _errors_as_messages(wants_traceback: bool) -> Iterator[None]:
    """Turns exceptions into one message on stderr and an exit status, and warnings into lines of their own."""
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of our output left, as `autopar models | head -1` does
        raise typer.Exit(0) from None
    except Exception as error:
        if wants_traceback:
            traceback.print_exception(error)
        if isinstance(error, AutoparError):
            for message in (_in_options(error), *getattr(error, "__notes__", ())):
                _say(message)
            raise typer.Exit(next(status for kind, status in _STATUS if isinstance(error, kind))) from None
        first = (str(error).strip().splitlines() or [""])[0][:300]
        hint = "" if wants_traceback else "; this is a bug, --traceback shows where"
        _say(f"unexpected {type(error).__name__}: {first}{hint}")
        raise typer.Exit(FAILED) from None


def _in_options(error: AutoparError) -> str:
    """The message of an error, with what a command takes in place of the argument of a call."""
    name = error.option if isinstance(error, CaptureError) else ""
    message = str(error).replace("pass loss_fn=...", "let the factory return a third value loss_fn")
    return message.replace(f"{name}=True", flag(name)) if name else message


def _say(message: str) -> None:
    line = f"autopar: {message}"
    if sys.stderr.isatty() and not message.startswith("next: "):  # a command stays one line, to be copied
        console(stderr=True).print(line)
    else:
        print(line, file=sys.stderr)


def _show_warning(message: Warning | str, category: type[Warning], *rest: Any) -> None:
    from autopar.ir.cluster import ClusterWarning

    if issubclass(category, ClusterWarning):  # warnings of other libraries are not for users of a command
        _say(f"warning: {message}")
