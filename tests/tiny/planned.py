"""A program and its plan, from a model, a cluster and all degrees."""

from typing import Any

from torch import nn

from autopar.capture.request import Request
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planning.fixed import capture_for, label_plan


def make_plan(
    model: nn.Module, cluster: ClusterSpec, example_inputs: Any, degrees: Degrees, *, name: str = ""
) -> tuple[Program, Plan]:
    program = capture_for(Request.of(model, example_inputs), degrees)
    return program, label_plan(program, cluster, degrees, name or type(model).__name__)
