"""`verify` compares with the module as its author wrote it, so it finds faults that capture and ranks share."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from kept_captures import capturing
from suites import long, thinned
from torch import fx

from autopar.capture import program as capture
from autopar.commands.verify import verify
from autopar.planning import fixed
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.verify.verify import Report

aten = torch.ops.aten
PLANS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "accumulate": {"tp": 2, "accumulate": 2},
    "pipeline": {"pp": 2, "micro_batches": 2},
}
FIRST = {"loss", "gradients", "loss and gradients of the example"}
ONE_DEVICE = {*FIRST, "clip norm", "parameters after AdamW"}
CAPTURED = {f"captured {name}" for name in ONE_DEVICE}


def verified(spec: str, plan: str, ranks: Ranks) -> Report:
    return verify(f"planted_ranks:{spec}", world_size=2, degrees=PLANS[plan], steps=2, ranks=ranks)


def failed(report: Report) -> set[str]:
    return {q.name for q in report.quantities if q.outcome == "different"}


def halved_gradient(graph: fx.Graph) -> None:
    """The value of the first activation stays, and its gradient is halved."""
    node = next(node for node in graph.nodes if node.target is aten.gelu.default)
    _instead(graph, node, lambda half: graph.call_function(aten.add.Tensor, (half, _detached(graph, half))))


def scaled_loss(graph: fx.Graph) -> None:
    """The last operator, of the last pipeline stage, scales the loss."""
    (loss, *_), *_ = graph.output_node().args
    assert isinstance(loss, fx.Node)
    _instead(graph, loss, lambda half: graph.call_function(aten.mul.Tensor, (half, 3.0)))


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(aten.detach.default, (node,))


def _instead(graph: fx.Graph, node: fx.Node, of_half: Callable[[fx.Node], fx.Node]) -> None:
    users = set(node.users)
    with graph.inserting_after(node):
        half = graph.call_function(aten.mul.Tensor, (node, 0.5))
    before = half.next
    with graph.inserting_before(before):
        new = of_half(half)
    for each in graph.nodes:
        if each is half or each is new or (each.op == "call_function" and each.target is aten.detach.default):
            each.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, new)


@pytest.mark.parametrize("spec", (long("plain"), "masked"))
@pytest.mark.parametrize("plan", PLANS)
def test_without_a_fault(spec: str, plan: str, two_ranks: Ranks) -> None:
    report = verified(spec, plan, two_ranks)
    assert report.passed, [(q.name, q.where, q.max_error) for q in report.quantities]
    assert {q.name for q in report.quantities} > ONE_DEVICE | CAPTURED


@pytest.mark.parametrize(
    ("fault", "plan"),
    thinned(
        product((halved_gradient, scaled_loss), PLANS),
        keep=((halved_gradient, "accumulate"), (scaled_loss, "pipeline")),
    ),
)
def test_a_fault_of_the_captured_graph(fault: Callable[[fx.Graph], None], plan: str, two_ranks: Ranks) -> None:
    """Both sides of the split run the graph, so only the module differs."""
    plain = capture.capture_flat

    def planted(*given: Any, **named: Any) -> Any:
        flat = plain(*given, **named)
        fault(flat.graph)
        return flat

    with capturing(), mock.patch.object(capture, "capture_flat", planted):
        report = verified("plain", plan, two_ranks)
    wanted = {"captured gradients", "captured loss and gradients of the example"}
    assert wanted | ({"captured loss"} if fault is scaled_loss else set()) <= failed(report) <= CAPTURED


@pytest.mark.parametrize("plan", ("accumulate", "pipeline"))
def test_micro_batches_whose_number_divides_nothing(plan: str, two_ranks: Ranks) -> None:
    """The reference in micro-batches has the same fault."""
    plain = fixed.capture_for

    def planted(*given: Any, **named: Any) -> Any:
        return replace(plain(*given, **named), loss_reduction="sum")

    with mock.patch.object(fixed, "capture_for", planted):
        report = verified("plain", plan, two_ranks)
    assert {"captured loss", "captured gradients"} <= failed(report) <= CAPTURED


@pytest.mark.parametrize("plan", ("accumulate", "pipeline"))
def test_a_divisor_dropped_in_one_micro_batch(plan: str, two_ranks: Ranks) -> None:
    two_ranks.run("planted_ranks:without_a_divisor")
    try:
        report = verified("masked", plan, two_ranks)
    finally:
        two_ranks.run("planted_ranks:mended")
    assert FIRST <= failed(report) <= ONE_DEVICE | {"outputs"}
