"""Programs that a test captures once. Its ranks read the file, and capture only if there is none.

Tests of `parallelize` show that every rank captures the same program.
"""

import functools
import hashlib
import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

from autopar.capture.record.file import from_bytes, to_bytes
from autopar.ir.program import Program

MODULE = importlib.import_module("autopar.capture.program")
CAPTURE = MODULE.capture_program


def captured_once(key: object, capture: Callable[[], Program]) -> Program:
    """The program of a key, whose repr must tell everything that the capture depends on."""
    folder = os.environ.get("AUTOPAR_TEST_CAPTURES")
    if folder is None or not Path(folder).is_dir():
        return capture()
    path = Path(folder, hashlib.sha256(repr(key).encode()).hexdigest())
    if not path.exists():
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_bytes(to_bytes(capture()))
        whole.rename(path)
    return from_bytes(path.read_bytes())


def captured_by_first_rank(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of a rank where whatever is traced, is so by rank 0 alone, which writes it down for the others."""

    def traced(model: nn.Module, example_inputs: Any, **options: Any) -> Program:
        failures: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                _traced_once(model, example_inputs, **options)
            except Exception as error:
                failures = [error]
        dist.broadcast_object_list(failures)
        if failures[0] is not None:
            raise failures[0]
        return _traced_once(model, example_inputs, **options)

    @functools.wraps(run)
    def inner(*arguments: Any, **options: Any) -> Any:
        with mock.patch.object(MODULE, "capture_program", traced):
            return run(*arguments, **options)

    return inner


def all_traced_once() -> AbstractContextManager[Any]:
    """In this process a model in the same form, traced again with the same options, is read."""
    return mock.patch.object(MODULE, "capture_program", _traced_once)


def _traced_once(model: nn.Module, example_inputs: Any, **options: Any) -> Program:
    key = (_form(model), [(n, v.shape, v.dtype) for n, v in example_inputs.items()], sorted(options.items()))
    return captured_once(key, lambda: CAPTURE(model, example_inputs, **options))


def _form(model: nn.Module) -> list[object]:
    """All that a model's program depends on: settings of modules, and tensors but for their values."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first = {id(v): n for n, v in reversed(tensors)}
    settings = [
        (n, type(m).__qualname__, [(k, v) for k, v in vars(m).items() if isinstance(v, int | float | str)])
        for n, m in model.named_modules()
    ]
    return [
        settings,
        str(model),
        str(getattr(model, "config", None)),
        [(n, first[id(v)], v.shape, v.dtype, str(v.device), v.requires_grad) for n, v in tensors],
    ]
