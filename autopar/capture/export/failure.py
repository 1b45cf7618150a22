"""The cause of a failed capture: the model's own error on one device, or the line that torch.export cannot follow."""

import contextlib
import operator
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dis import opname

import torch
from torch import fx, nn

from autopar.capture.export.data_reads import REMEDY
from autopar.capture.export.source_lines import OURS, TORCH, left_out, line_that_failed
from autopar.errors import CaptureError

_SAFE = os.path.join(TORCH, "nn") + os.sep  # whose errors are about arguments of a user
# words of errors about the machinery of a trace, which no user wrote
_INTERNAL = re.compile(
    r"torch\.export|fake|prox(y|ies)|github|symint|symnode|symbol|dynamo|unbacked|functorch|guard", re.I
)
_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")
_WITHOUT_VALUE = "data is not allocated", "fake tensor in the exported program", "Cannot access data pointer"
_TRANSFORMS = "has no attribute 'constant'", "functorch", "torch.func", "vmap"
_NO_KERNEL = ("UnsupportedOperatorException", "MissingOpProfile")
_NO_KERNEL_TEXTS = ("no fake impl", "register_fake", "meta kernel", "couldn't find symbolic meta function")
_OPERATOR = re.compile(r"\b(\w+(::|\.)\w+(\.\w+)?)\b")
_DEVICES = ("FakeTensorDeviceMismatchError",)
MAX_CHARS = 300
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
# remedies for values that no rank could hold: sparse tensors, and tensors whose sizes depend on data
_DENSE = (
    "autopar splits dense tensors; hold its indices and values as two dense tensors and use index_select and "
    "index_add, or make it dense with .to_dense()"
)
_KINDS = {"lifted": "constant"}
_FIXED = "use a mask with torch.where, or a fixed number of elements as torch.topk gives"


def capture_error(
    failed: Exception,
    model: nn.Module,
    run: Callable[[], object],
    run_resized: Callable[[], object],
    resized: str,
    *,
    on_meta: bool,
) -> CaptureError:
    """The error of a capture that `failed`, if calls on one device show no other. `resized` says how inputs differ."""

    def error_of(run: Callable[[], object]) -> Exception | None:
        with _as_it_was(model), warnings.catch_warnings(action="ignore"):
            try:
                run()
            except Exception as error:
                return None if on_meta and "meta" in str(error) else error
        return None

    failure = error_of(run)
    if failure is not None:
        return CaptureError(
            f"the model fails on one device, without autopar: {_described(failure, model)}\n"
            "Correct the model or its inputs until model(**inputs) runs."
        )
    failure = error_of(run_resized) if resized else None
    if failure is not None:
        return CaptureError(
            f"the model runs with the example inputs, but fails on one device with other sizes of them: "
            f"{_described(failure, model)}\n{resized}"
        )
    return not_captured(failed, model, may_refuse=on_meta)


def not_captured(failed: Exception, model: nn.Module, *, may_refuse: bool = False) -> CaptureError:
    """The error of a model that torch cannot record. A model that did not run here `may_refuse` its inputs."""
    line, text = line_that_failed(failed, model), str(failed).strip().split("\n")[0][:MAX_CHARS]
    refuses = may_refuse and _is_check(failed)
    what = f": {type(failed).__name__}: {text}" if refuses or _is_for_users(failed) else ""
    code = f": `{line.code}`" if line.code else ""
    if refuses:
        return CaptureError(
            f"the model refuses these inputs: {line}{code}{what}\nCorrect them, or leave this batch out."
        )
    return CaptureError(f"the model cannot be captured: {line}{code}{what}\n{_advice(failed, model)}")


def _is_for_users(failed: Exception) -> bool:
    """Whether the code of a user, or a function that he calls with wrong arguments, raised an error."""
    frames = traceback.extract_tb(failed.__traceback__)
    file = frames[-1].filename if frames else ""
    text = f"{type(failed).__name__}: {failed}"
    return bool(file) and (file.startswith(_SAFE) or not file.startswith(TORCH)) and not _INTERNAL.search(text)


def _is_check(failed: Exception) -> bool:
    """Whether a line of the model raised an error itself, or torch's function for checks did."""
    trace = failed.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] != "RAISE_VARARGS":
        return False
    code = trace.tb_frame.f_code
    return code.co_name.startswith(("_assert", "_check")) or (
        code.co_filename.startswith(_SAFE) or not code.co_filename.startswith((TORCH, OURS))
    )


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
        name = next((match[0] for match in _OPERATOR.finditer(text) if "torch" not in match[0]), "")
        return f"Give the custom operator {name} a fake kernel (torch.library.register_fake).".replace("  ", " ")
    if kind in _DEVICES or "same device" in text:
        return "Create the tensors of this code on the device of another tensor (device=x.device)."
    if any(part in text for part in _WITHOUT_VALUE):
        return (
            "This code makes a tensor of values that a trace does not have. Use operators of torch "
            "for functions of other packages."
        )
    if any(part in text for part in _TRANSFORMS):
        return (
            "A function of torch.func differentiates here, which is not recorded. Use torch.autograd.grad(..., "
            "create_graph=True), one call for the sum over samples."
        )
    return (
        "This code cannot be recorded as a graph of operators. Write this line with operators of torch; --traceback of "
        "the command, or the cause of this error, shows the call that failed."
    )


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


def refuse_unusable(
    graph: fx.Graph, placeholders: dict[str, tuple[str, str]], with_lines: Callable[[], fx.Graph]
) -> None:
    """Raise `CaptureError` for the first value that no rank could hold. It names the operator, module and line."""
    node, what, remedy = next(_unusable(graph), (None, "", ""))
    if node is None:
        return
    if node.op != "call_function":
        kind, name = placeholders.get(node.name, ("tensor", str(node.target)))
        raise CaptureError(f"the {_KINDS.get(kind, kind)} {name.removeprefix('model.')!r} {what}; {remedy}")
    line = next((_line_of(other) for other in with_lines().nodes if other.name == node.name), "")
    maker = node.args[0] if node.target is operator.getitem else node
    target = maker.target if isinstance(maker, fx.Node) else node.target
    raise CaptureError(f"operator {target}{f' ({line})' if line else ''} {what}; {remedy}")


def _unusable(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, str]]:
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not (node.users or node.op == "call_function"):
            continue
        if value.layout is not torch.strided:
            layout = str(value.layout).removeprefix("torch.").removeprefix("_")
            yield node, f"{'is' if node.op != 'call_function' else 'returns'} a {layout} tensor", _DENSE
        elif any(not isinstance(size, int) for size in value.shape):
            yield node, "returns a tensor whose size depends on the values of its operands", _FIXED


def _line_of(node: fx.Node) -> str:
    """The deepest line outside of torch that made a node of an export with stack traces: ``net.py:12``."""
    lines = [m for m in _FRAME.finditer(node.meta.get("stack_trace") or "") if "/torch/" not in m["file"]]
    return f"{lines[-1]['file']}:{lines[-1]['line']}" if lines else ""
