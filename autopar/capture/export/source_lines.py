"""The module and the source line of a model that runs now, or that raised an error."""

import inspect
import linecache
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError

TORCH = os.path.dirname(torch.__file__) + os.sep  # the folder of its code
_MODELS_OF_TORCH = os.path.join(TORCH, "nn", "modules") + os.sep
OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of a model's code, and the path and class of the module that runs it."""

    module: str
    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.module}, {self.file}:{self.number}" if self.file else self.module

    @property
    def code(self) -> str:
        """The text of the line. Empty without source."""
        return linecache.getline(self.file, self.number).strip()


def line_that_runs(model: nn.Module) -> SourceLine:
    """The innermost line of a model's code that runs now. The code of torch's modules counts too."""
    paths, module, place = _paths(model), "", ("", 0)
    frame = sys._getframe(1)
    while frame is not None and not (module and place[1]):
        if not place[1] and _is_of_a_model(frame.f_code, torch_too=True):
            place = frame.f_code.co_filename, frame.f_lineno
        if not module:
            module = _module_of(frame.f_locals, paths)
        frame = frame.f_back  # type: ignore[assignment]
    return SourceLine(module=module or f"module {type(model).__name__}", file=place[0], number=place[1])


def refusal(model: nn.Module, what: str, option: str = "") -> CaptureError:
    """The error of the line that runs now. `what` says what it does, and the remedy; an `option` would permit it."""
    line = line_that_runs(model)
    return CaptureError(f"the model cannot be captured: {line}: `{line.code}` {what}", option=option)


def line_that_failed(error: BaseException, model: nn.Module) -> SourceLine:
    """The deepest line of the user's code in the traceback of an error. A line of torch only if there is no other."""
    return _failed(error, model)[0]


def left_out(error: BaseException, model: nn.Module) -> tuple[str, ...]:
    """The inputs of a model that are None in the line that failed."""
    line, variables = _failed(error, model)
    names = inspect.signature(model.forward).parameters
    return tuple(n for n in names if n in variables and variables[n] is None and re.search(rf"\b{n}\b", line.code))


def _failed(error: BaseException, model: nn.Module) -> tuple[SourceLine, Mapping[str, Any]]:
    """The line of the user's code that failed, and the variables there."""
    paths, module = _paths(model), ""
    users, torchs, variables = ("", 0), ("", 0), dict[str, Any]()
    seen: BaseException | None = error
    while seen is not None:
        trace = seen.__traceback__
        inside = False
        while trace is not None:
            code, owner = trace.tb_frame.f_code, _module_of(trace.tb_frame.f_locals, paths)
            inside = inside or bool(owner)
            module = owner or module
            if inside and _is_of_a_model(code, torch_too=False):
                users, variables = (code.co_filename, trace.tb_lineno), trace.tb_frame.f_locals
            elif owner and _is_of_a_model(code, torch_too=True):
                torchs = code.co_filename, trace.tb_lineno
            trace = trace.tb_next
        seen = seen.__cause__ or seen.__context__
    file, number = users if users[1] else torchs
    return SourceLine(module=module or f"module {type(model).__name__}", file=file, number=number), variables


def _paths(model: nn.Module) -> Mapping[int, str]:
    return {
        id(module): f"module {(name or type(module).__name__)!r} ({type(module).__name__})"
        for name, module in model.named_modules()
    }


def _module_of(variables: Mapping[str, Any], paths: Mapping[int, str]) -> str:
    return paths.get(id(variables.get("self")), "")


def _is_of_a_model(code: CodeType, *, torch_too: bool) -> bool:
    file = code.co_filename
    if file.startswith(TORCH):
        return torch_too and file.startswith(_MODELS_OF_TORCH) and code.co_name != "_call_impl"
    return not file.startswith(("<", OURS))
