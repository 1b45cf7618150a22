"""The cause of a failed capture: the model's own error on one device, or the line that torch.export cannot follow."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from autopar.capture.export.data_reads import REMEDY
from autopar.capture.export.source_lines import left_out, line_that_failed
from autopar.errors import CaptureError

_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")
_NO_KERNEL = ("UnsupportedOperatorException", "MissingOpProfile")
_NO_KERNEL_TEXTS = ("no fake impl", "register_fake", "meta kernel", "couldn't find symbolic meta function")
_DEVICES = ("FakeTensorDeviceMismatchError",)
MAX_CHARS = 300


@dataclass(frozen=True, eq=False, kw_only=True)
class OneDevice:
    """Calls of a model on one device: with the user's own inputs, and with the inputs of the capture.

    `resized` says how the two inputs differ, and is empty if they have the same sizes.
    """

    run: Callable[[], object]
    run_resized: Callable[[], object]
    resized: str = ""


def capture_error(failed: Exception, model: nn.Module, calls: OneDevice, *, on_meta: bool) -> CaptureError:
    """The error of a capture that `failed`.

    With `on_meta` the model has no weights, so that errors about meta tensors are not its own.
    """

    def error_of(run: Callable[[], object]) -> Exception | None:
        error = _error_of(model, run)
        return None if error is None or (on_meta and "meta" in str(error)) else error

    own = error_of(calls.run)
    if own is not None:
        return CaptureError(
            f"the model fails on one device, without autopar: {_described(own, model)}\n"
            "Correct the model or its inputs until model(**inputs) runs."
        )
    own = error_of(calls.run_resized) if calls.resized else None
    if own is not None:
        return CaptureError(
            f"the model runs with the example inputs, but fails on one device with other sizes of them: "
            f"{_described(own, model)}\n{calls.resized}"
        )
    return CaptureError(f"the model cannot be captured: {_described(failed, model)}\n{_advice(failed, model)}")


def _described(error: Exception, model: nn.Module) -> str:
    lines = str(error).strip().split("\n")
    text = f"{line_that_failed(error, model)}: {type(error).__name__}: {lines[0][:MAX_CHARS]}"
    return text.removesuffix(": ")


def _advice(failed: Exception, model: nn.Module) -> str:
    kind, text = type(failed).__name__, str(failed)
    missing = left_out(failed, model) if "NoneType" in text else ()
    if missing:
        names = " and ".join(map(repr, missing))
        return f"A run without torch.export fills in {names} and a capture does not: give it in the example inputs."
    if kind in _DATA_DEPENDENT or "data-dependent" in text or "unbacked" in text:
        return f"The shapes or branches of this code depend on data: {REMEDY}."
    if kind in _NO_KERNEL or any(part in text for part in _NO_KERNEL_TEXTS):
        return "Give the custom operator a fake kernel (torch.library.register_fake)."
    if kind in _DEVICES or "same device" in text:
        return "Create the tensors of this code on the device of another tensor (device=x.device)."
    return "torch.export cannot follow this code. Write this line with operators of torch."


def _error_of(model: nn.Module, run: Callable[[], object]) -> Exception | None:
    """The error of the model on one device. Its buffers and the random state stay as they are."""
    with _as_it_was(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except Exception as error:
            return error
    return None


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """A context that restores the values of buffers and the random state at its end."""
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before and buffer.shape == before[name].shape:
                    buffer.copy_(before[name])
