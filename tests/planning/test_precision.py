"""The precision of a request that names none, and a plan in float32 beside the plan in bf16."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec
from autopar.planning.options import PlanOptions
from autopar.planning.precision import usual_precision

GPUS, CPUS, OLD_GPUS = (ClusterSpec.parse(text) for text in ("4xh100", "4xcpu", "4xv100-32gb"))


class Dense(nn.Module):
    """Computes in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


class Float32(Dense):
    """Makes a value in float32, which a layer in bf16 does not take."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.ones(256, dtype=torch.float32))


class Solved(Dense):
    """Has an operator that CUDA does not have in bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.linalg.solve(torch.eye(256, dtype=x.dtype), x.mT).mT)


INPUTS = {"x": torch.zeros(4, 256)}


def searched(model: nn.Module, cluster: str = "4xh100", **options: Any) -> autopar.SearchResult:
    return autopar.plan(model, cluster, example_inputs=INPUTS, global_batch=4096, **options)


@pytest.mark.parametrize(
    ("dtype", "cluster", "expected"),
    [
        (torch.float32, GPUS, "bf16"),
        (torch.float32, CPUS, None),
        (torch.float32, OLD_GPUS, None),  # fp16 needs a scaler of gradients
        (torch.bfloat16, GPUS, None),
        (torch.float64, GPUS, None),
    ],
)
def test_only_a_float32_model_on_gpus_with_bf16_computes_in_bf16(
    dtype: torch.dtype, cluster: ClusterSpec, expected: str | None
) -> None:
    assert usual_precision(Dense().to(dtype), cluster) == expected


def test_a_model_of_several_dtypes_and_a_model_under_autocast_keep_their_dtypes() -> None:
    mixed = Dense()
    mixed.up.double()
    assert usual_precision(mixed, GPUS) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert usual_precision(Dense(), GPUS) is None


def test_an_own_model_plans_in_bf16_and_the_first_line_says_so() -> None:
    found = searched(Dense())
    assert (found.precision, found.plan and found.plan.degrees.precision) == ("bf16", "bf16")
    assert found.plan is not None and found.plan.explain().splitlines()[0] == "Plan for Dense, computing in bf16"
    assert any(note.startswith("the float32 model computes in bf16") for note in found.notes)
    on_cpus = searched(Dense(), "4xcpu")
    assert on_cpus.plan is not None and on_cpus.plan.degrees.precision is None
    assert on_cpus.plan.explain().splitlines()[0] == "Plan for Dense, computing in the dtype of the model"


def test_a_plan_in_fp32_says_what_bf16_would_give() -> None:
    found, faster = searched(Dense(), precision="fp32"), searched(Dense())
    assert found.best is not None and faster.best is not None
    assert found.best.step_s > faster.best.step_s
    (note,) = [note for note in found.notes if note.startswith("precision bf16 would take")]
    assert note.endswith(f"fp32 takes {found.best.step_s / faster.best.step_s:.1f} times as long")


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Float32, "linear:0 has operands of several dtypes"), (Solved, "linalg_solve_ex.default_0 has no kernel in bf16")],
)
def test_a_model_that_does_not_run_in_bf16_stays_in_float32(kind: type[nn.Module], why: str) -> None:
    found = searched(kind())
    assert (found.precision, found.plan and found.plan.degrees.precision) == ("fp32", None)
    (note,) = [note for note in found.notes if "does not run in bf16" in note]
    assert why in note
    assert autopar.estimate(kind(), "4xh100", {"dp": 4}, example_inputs=INPUTS).precision == "fp32"


def test_an_estimate_takes_the_precision_of_a_plan() -> None:
    rest = {"example_inputs": INPUTS}
    assert autopar.estimate(Dense(), "4xh100", {"dp": 4}, **rest).precision == "bf16"
    assert autopar.estimate(Dense(), "4xh100", {"dp": 4, "precision": "fp32"}, **rest).precision == "fp32"
    assert "precision" not in autopar.estimate(Dense().double(), "4xh100", {"dp": 4}, **rest).degrees


@pytest.mark.parametrize("value", ["fp32", ("fp32",)])
def test_a_fixed_precision_is_the_precision_of_the_capture(value: Any) -> None:
    assert PlanOptions(fix={"precision": value, "tp": 2}).precision == "fp32"
    found = searched(Dense(), fix={"precision": value})
    assert (found.precision, found.plan and found.plan.degrees.precision) == ("fp32", "fp32")


def test_words_that_no_search_chooses_are_not_degrees() -> None:
    asked, wish = PlanOptions(local_batch=2).joined_with({"precision": "bf16", "optimizer": "sgd", "tp": 2})
    assert (asked.precision, asked.optimizer, wish) == ("bf16", "sgd", {"tp": 2})
    with pytest.raises(InputError, match="precision 'fp32' beside 'bf16'"):
        PlanOptions(precision="fp32").joined_with({"precision": "bf16"})


class Scaled(Dense):
    """A buffer in float32 meets activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


@pytest.fixture
def alone() -> Iterator[None]:
    """`parallelize` makes a process group. Other tests of this process need none."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_operands_of_several_dtypes_are_refused_with_a_remedy_that_works() -> None:
    wish: dict[str, Any] = {"example_inputs": INPUTS, "plan": {"dp": 1, "precision": "bf16"}}
    with pytest.raises(InputError, match=r"up:linear:0 has operands of several dtypes.*under torch.autocast"):
        autopar.parallelize(Scaled(), "1xcpu", **wish)
    with torch.autocast("cpu", torch.bfloat16):
        parallel = autopar.parallelize(Scaled(), "1xcpu", example_inputs=INPUTS, plan={"dp": 1})
    assert parallel.forward_backward(INPUTS).isfinite()


class Normed(Dense):
    """The weight of the first layer, and another attribute, are computed of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.weight_norm(self.up)
        self.seen = [self.down.weight * 2]


@pytest.mark.usefixtures("alone")
def test_computed_attributes_do_not_stand_in_the_way_of_a_precision() -> None:
    wish: dict[str, Any] = {"example_inputs": INPUTS, "plan": {"dp": 1, "precision": "bf16"}}
    torch.manual_seed(0)
    model, batch = Normed(), {"x": torch.randn(4, 256)}
    loss = autopar.parallelize(model, "1xcpu", **wish).forward_backward(batch)
    assert loss.item() == pytest.approx(model(**batch).item(), rel=0.02)
