"""Wishes in one call of `autopar.parallelize`: precision, whole batch, fixed and forbidden values, objective."""

import logging
from collections.abc import Iterator
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.planning import precision
from autopar.runtime.model.module import ParallelModel


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """`parallelize` makes a world of one rank, which would keep other checks from theirs."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def parallelized(rows: int = 4, cluster: str = "1xcpu", **request: Any) -> ParallelModel:
    torch.manual_seed(0)
    return autopar.parallelize(Square(), cluster, example_inputs={"x": torch.ones(rows, 8)}, **request)


@pytest.mark.parametrize("request_", [{"precision": "bf16"}, {"plan": {"precision": "bf16"}}], ids=str)
def test_a_precision_without_degrees_is_searched_with(request_: dict[str, Any]) -> None:
    parallel = parallelized(**request_)
    assert (parallel.plan.degrees.precision, parallel.plan.degrees.local_batch) == ("bf16", 4)
    assert {p.dtype for p in parallel.parameters()} == {torch.float32}
    plain, x = Square(), torch.randn(4, 8)
    plain.load_state_dict(parallel.state_dict())
    expected = plain(x)
    assert float(parallel(x=x)) == pytest.approx(float(expected), rel=0.02)
    assert float(parallel(x=x)) != float(expected)


def test_the_whole_batch_is_searched_and_the_inputs_give_shapes_only() -> None:
    parallel = parallelized(global_batch=16, fix={"micro_batch": 2})
    degrees = parallel.plan.degrees
    assert (degrees.global_batch, degrees.micro_batch, degrees.num_micro_batches) == (16, 2, 8)
    x = torch.randn(16, 8)
    plain = Square()
    plain.load_state_dict(parallel.state_dict())
    loss = plain(x)
    loss.backward()
    assert float(parallel.forward_backward({"x": x})) == pytest.approx(float(loss), rel=1e-5)
    for name, own in parallel.named_parameters():
        torch.testing.assert_close(own.grad, plain.get_parameter(name).grad)
    assert parallelized(global_batch=16, plan={"dp": 1, "accumulate": 2}).plan.degrees.micro_batch == 8


def test_forbidden_values_and_the_objective_count() -> None:
    assert parallelized(8, forbid={"micro_batch": 8}, objective="memory").plan.degrees.num_micro_batches > 1


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"plan": {"dp": 1}, "fix": {"zero": 1}}, "fix beside plan"),
        ({"plan": {"dp": 1}, "objective": "memory"}, "objective beside plan"),
        ({"plan": {"precision": "bf16"}, "precision": "fp32"}, "precision 'fp32' beside 'bf16'"),
        ({"plan": "tuned", "precision": "bf16"}, "precision beside plan"),
        ({"precision": "bf17"}, "precision 'bf17' is unknown"),
        ({"global_batch": 0}, "global_batch"),
        ({"objective": "speed"}, "unknown objective 'speed'"),
        ({"fix": {"tpp": 1}}, "tpp"),
    ],
    ids=str,
)
def test_wishes_that_contradict_each_other_are_named(request_: dict[str, Any], named: str) -> None:
    with pytest.raises((InputError, PlanError), match=named):
        parallelized(**request_)


def test_a_plan_has_all_decisions() -> None:
    plan = parallelized().plan
    with pytest.raises(InputError, match="precision, global_batch beside plan"):
        parallelized(plan=plan, precision="bf16", global_batch=4)


def test_a_chosen_precision_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are CPUs, so the choice for GPUs is made for them."""

    def on_gpus(model: nn.Module, cluster: ClusterSpec) -> str | None:
        return "bf16"

    monkeypatch.setattr(precision, "usual_precision", on_gpus)
    with TestCase().assertLogs("autopar", logging.WARNING) as logged:
        searched, given = parallelized().plan, parallelized(plan={"dp": 1}).plan
    assert searched.degrees.precision == given.degrees.precision == "bf16"
    said = [record.getMessage() for record in logged.records if "computes in bf16" in record.getMessage()]
    assert len(said) == 2 and said[0] in searched.notes and said[1] in given.notes
    assert parallelized(precision="fp32").plan.degrees.precision == "fp32"
