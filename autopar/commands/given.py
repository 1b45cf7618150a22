"""The model that a measured search is given, by a caller or by a training script.

A script runs until it calls `autopar.parallelize`. The arguments of this call are taken.
"""

import runpy
import shlex
import sys
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from autopar.capture.request import Inputs, LossFunction, Request
from autopar.errors import InputError
from autopar.models.example_inputs import derived_inputs

_INSTEAD = "or name a function that returns (model, example_inputs), as package.module:factory"


@dataclass(frozen=True, eq=False, kw_only=True)
class Given:
    """The model of a search with its inputs, and messages for the user."""

    request: Request
    name: str
    origin: str = ""  # the module, factory or script that may register operators of its own
    precision: str | None = None  # that the script names
    notes: tuple[str, ...] = ()


class _CallSignal(BaseException):
    """The script called `autopar.parallelize`. No `except Exception` of the script catches it."""

    def __init__(self, given: Given) -> None:
        self.given = given


def is_script(text: str) -> bool:
    """Whether a text is a Python file, perhaps with arguments."""
    return text.partition(" ")[0].endswith(".py")


def given_by_script(text: str) -> Given:
    """Run a script until it calls `autopar.parallelize`, and take the model, the inputs and the loss of this call."""
    file, *arguments = shlex.split(text)
    if not Path(file).is_file():
        raise InputError(f"there is no script {file}")

    def parallelize(
        model: nn.Module,
        cluster_spec: Any,
        *,
        example_inputs: Inputs | None = None,
        loss_fn: LossFunction | None = None,
        specialise: bool = False,
        precision: str | None = None,
        plan: Any = None,
        **_: Any,
    ) -> None:
        inputs = derived_inputs(model) if example_inputs is None else example_inputs
        raise _CallSignal(
            Given(
                request=Request.of(model, inputs, loss_fn, specialise=specialise),
                name=type(model).__name__,
                origin=text,
                precision=precision or (plan.get("precision") if isinstance(plan, dict) else None),
            )
        )

    with ExitStack() as stack:
        for name in ("autopar.parallelize", "autopar.api.parallelize"):
            stack.enter_context(patch(name, parallelize))
        stack.enter_context(patch.object(sys, "argv", [file, *arguments]))
        stack.enter_context(patch.object(sys, "path", [str(Path(file).parent.resolve()), *sys.path]))
        try:
            runpy.run_path(file, run_name="__main__")
        except _CallSignal as reached:
            return reached.given
        except (Exception, SystemExit) as error:
            if (called := _before(error)) is not None:
                return called.given
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise InputError(
                f"{file} raised {type(error).__name__}: {error} ({where.filename}:{where.lineno}) before it called "
                f'autopar.parallelize; give its arguments in one text, such as "{file} --size 2", {_INSTEAD}'
            ) from error
    raise InputError(f"{file} ended without a call of autopar.parallelize; add one, {_INSTEAD}")


def _before(error: BaseException) -> _CallSignal | None:
    """The call, if the script's clean-up after it raised the error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _CallSignal):
        cause = cause.__context__
    return cause
