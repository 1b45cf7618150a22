"""The precision of a request that names none.

On GPUs with bf16 a model in float32 computes in bf16, beside float32 master weights. Every other model is left as it is
written: fp16 needs a `GradScaler`, and a model in 16 bits, in float64 or under autocast has its dtypes from its author.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from autopar.capture.passes.autocast import ambient_autocast
from autopar.cost_model.machine.cluster import default_precision
from autopar.errors import CaptureError, InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.program import Program
from autopar.planning.options import PlanOptions
from autopar.rules.rule import TensorInfo
from autopar.search.result.format import plan_in_words
from autopar.search.result.result import SearchResult
from autopar.words.numbers import readable_bytes, readable_seconds

_T = TypeVar("_T")
_CHOSEN = "the float32 model computes in bf16, with float32 parameters and optimizer state; fp32 turns this off"
_WITHOUT_BF16 = re.compile(  # operators that CUDA does not have in bf16
    r"(aten|autopar)\.(_?linalg_(?!vector_norm|norm|matrix_norm|cross|vecdot|matmul|multi_dot|diagonal|matrix_exp)|"
    r"cholesky|triangular_solve|inverse|logdet|slogdet|det\.|svd|qr\.|lu_|_?cdist|_?pdist|complex\.|polar\.)"
)
_PRODUCT = re.compile(r"(aten|autopar)\.(linear|matmul|b?mm|addmm|baddbmm|(add)?mv\b|v?dot\b|conv)")
_OF_ONE_DTYPE = re.compile(_PRODUCT.pattern.replace("|conv", "|conv|scaled_dot_product|layer_norm|group_norm"))


def usual_precision(model: nn.Module | Program, cluster: ClusterSpec) -> str | None:
    """The precision of a model on a cluster if the user names none. None leaves the model as it is written."""
    if isinstance(model, Program) or default_precision(cluster) != "bf16" or ambient_autocast():
        return None
    return "bf16" if {each.dtype for each in model.parameters()} == {torch.float32} else None


def in_precision_of(
    precision: str | None,
    model: nn.Module | Program,
    cluster: ClusterSpec | None,
    capture: Callable[[str | None], _T],
    program_of: Callable[[_T], Program],
) -> tuple[_T, str | None, tuple[str, ...]]:
    """A capture in the named or the usual precision, or as the model is written; this precision; and notes."""
    usual = usual_precision(model, cluster) if precision is None and cluster is not None else None
    if usual is None:
        named = capture(precision)
        if precision is not None and cluster is not None and (reason := _mixed(program_of(named), _PRODUCT)):
            raise InputError(
                f"the model does not run in precision {precision!r}, where buffers and constants keep their dtype: "
                f"{reason}; give them the dtype where they are used, as in x * self.scale.to(x.dtype), or leave the "
                "precision out and call parallelize under torch.autocast"
            )
        return named, precision, ()
    try:
        captured = capture(usual)
        reason = _why_not(program_of(captured)) or ""
        if not reason:
            return captured, usual, (_CHOSEN,)
    except PlanError:  # about the degrees, in every precision
        raise
    except (CaptureError, InputError) as error:
        reason = str(error).splitlines()[0]
    return capture(None), None, (f"the model computes in float32, because it does not run in {usual}: {reason}",)


def _why_not(program: Program) -> str | None:
    """The reason why a program in bf16 does not run on CUDA. `torch.export` does not see it."""
    for node, dtypes in _dtypes_of_operands(program):
        if _WITHOUT_BF16.match(str(node.target)) and torch.bfloat16 in dtypes:
            return f"{node.target} has no kernel in bf16"
    return _mixed(program, _OF_ONE_DTYPE)


def _mixed(program: Program, operators: re.Pattern[str]) -> str | None:
    """The first of the operators, which need operands of one dtype, that has others."""
    for node, dtypes in _dtypes_of_operands(program):
        if operators.match(str(node.target)) and len(dtypes) > 1:
            return f"{node.meta['key']} has operands of several dtypes, {', '.join(sorted(map(str, dtypes)))}"
    return None


def _dtypes_of_operands(program: Program) -> Iterator[tuple[Any, set[torch.dtype]]]:
    for node in (node for block in program.blocks for node in block.graph.nodes if node.op == "call_function"):
        infos = (n.meta.get("info") for n in node.all_input_nodes)
        yield node, {info.dtype for info in infos if isinstance(info, TensorInfo) and info.dtype.is_floating_point}


def with_bf16_beside(
    result: SearchResult, options: PlanOptions, cluster: ClusterSpec, search: Callable[[PlanOptions], SearchResult]
) -> SearchResult:
    """The result that also says what bf16 would give, if the user asked for fp32 on devices that have bf16."""
    if options.precision != "fp32" or default_precision(cluster) != "bf16":
        return result
    try:
        other = search(replace(options, precision="bf16", top=0, trials=0, study=None, report=False)).best
    except (CaptureError, InputError):  # in bf16 the model cannot be captured
        return result
    if other is None:
        return result
    takes = f"{readable_seconds(other.step_s)} a step and {readable_bytes(other.peak_bytes)} of a device"
    text = f"precision bf16 would take {takes} ({plan_in_words(other.degrees)})"
    if result.best is None:
        nearest = result.closest and replace(result.closest, remedy=f"{text}, or {result.closest.remedy}")
        return replace(result, closest=nearest)
    faster = f"; fp32 takes {result.best.step_s / other.step_s:.1f} times as long"
    return replace(result, notes=(*result.notes, text + faster))
