"""Random numbers that a model draws with NumPy or with Python's `random`.

A capture would keep them as constants: every step would have the same numbers. So such a model is refused, with the
line that draws.
"""

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from torch import nn

from autopar.capture.export.source_lines import SourceLine, line_that_runs
from autopar.errors import CaptureError


def drawn_so_far() -> tuple[object, ...]:
    """The states of the generators of NumPy and Python. They differ if numbers were drawn in between."""
    numpy = sys.modules.get("numpy")
    states: list[object] = [random.getstate()]
    if numpy is not None:
        _, keys, position, *gauss = numpy.random.get_state()
        states.append((keys.tobytes(), position, *gauss))
    return tuple(states)


def refuse_foreign_draws(model: nn.Module, before: tuple[object, ...], rerun: Callable[[], object]) -> None:
    """Raise `CaptureError` if numbers were drawn since `before`. `rerun` runs the model again to find the line."""
    if drawn_so_far() == before:
        return
    lines: list[SourceLine] = []
    with contextlib.suppress(Exception), _watched(lambda: lines.append(line_that_runs(model))):
        rerun()
    where = f"{lines[0]}: `{lines[0].code}`" if lines else "its forward pass"
    raise CaptureError(
        f"the model cannot be captured: {where} draws random numbers with NumPy or Python, so every step would have "
        "the same numbers; draw them with torch, or turn the draw off in the configuration (such as "
        "apply_spec_augment=False)"
    )


@contextlib.contextmanager
def _watched(drawn: Callable[[], object]) -> Iterator[None]:
    """A context in which a function of `numpy.random` or `random` calls `drawn` before it runs."""

    def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        drawn()
        return function(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for module in (random, sys.modules.get("numpy.random")):
            for name, each in list(vars(module).items()) if module is not None else ():
                if callable(each) and not isinstance(each, type) and not name.startswith("_"):
                    stack.enter_context(patch.object(module, name, functools.partial(watched, each)))
        yield
