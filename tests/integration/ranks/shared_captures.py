"""Captures that the tests of one session share: whoever needs one first makes it, and the others read its record.

A fixture turns this on in the process of the tests of this folder and on its ranks. Captures that depend on values of
inputs are made anew.
"""

import hashlib
import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from autopar._torch.private import pytree
from autopar.capture.record.file import from_bytes, to_bytes
from autopar.capture.record.write import Unexplained
from autopar.ir.program import Program

MODULE = importlib.import_module("autopar.capture.program")
importlib.import_module("autopar.capture.any_size")  # it needs both captures, so it keeps the function of the product
CAPTURE = MODULE.capture_twice
FOLDER = "AUTOPAR_TEST_CAPTURES"


def captured_once(key: object, capture: Callable[[], Program]) -> Program:
    """The program of a key, whose repr must tell everything that the capture depends on."""
    folder = os.environ.get(FOLDER)
    if folder is None or not Path(folder).is_dir():
        return capture()
    path = Path(folder, hashlib.sha256(repr(key).encode()).hexdigest())
    if not path.exists():
        program, whole = capture(), path.with_suffix(f".{os.getpid()}")
        try:
            whole.write_bytes(to_bytes(program))
        except Unexplained:
            return program
        whole.rename(path)
    return from_bytes(path.read_bytes())


def shared_capture(asked: Any, batch: int | None = None) -> Any:
    """In place of `capture_twice`, of whose result a plan of given degrees takes the program alone."""
    reading = asked.reading
    if reading.specialise or reading.decided or reading.answers is not None or reading.buffers is not None:
        return CAPTURE(asked, batch)
    key = (_form(asked.model), _inputs(asked.inputs), _function(asked.loss_fn), asked.training, asked.products,
           asked.staged, batch, torch.get_default_dtype(), torch.is_autocast_enabled("cpu"))  # fmt: skip
    return SimpleNamespace(program=captured_once(key, lambda: CAPTURE(asked, batch).program))


def share(rank: int, folder: str) -> None:
    """Turn it on on a rank."""
    os.environ[FOLDER] = folder
    MODULE.capture_twice = shared_capture  # type: ignore[attr-defined]


def capturing(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """With `CAPTURE` or `shared_capture` as what captures a model."""
    return mock.patch.object(MODULE, "capture_twice", function)


def _inputs(inputs: Any) -> object:
    leaves, form = pytree.tree_flatten(inputs)
    return form, [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else repr(v) for v in leaves]


def _function(function: Any) -> object:
    code = getattr(function, "__code__", None)
    return _form(function) if isinstance(function, nn.Module) else (repr(function) if code is None else code.co_code)


def _form(model: nn.Module) -> list[object]:
    """All that a model's program depends on: settings of modules, and tensors but for values of parameters."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first = {id(v): n for n, v in reversed(tensors)}
    settings = [
        (
            n,
            type(m),
            [(k, getattr(v, "__qualname__", None) or repr(v)) for k, v in vars(m).items() if k[:1] != "_"],
            [*m._forward_hooks.values()],
        )
        for n, m in model.named_modules()
    ]
    small = [v.tolist() for v in model.buffers() if not v.is_meta and v.numel() < 5000]
    parameters = [(n, first[id(v)], v.shape, v.dtype, str(v.device), v.requires_grad) for n, v in tensors]
    return [settings, str(model), str(getattr(model, "config", None)), parameters, small]
