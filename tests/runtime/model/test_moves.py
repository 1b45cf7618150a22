"""Lines that usual scripts have after the model: moves that change nothing pass, all others raise one clear error."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import ClusterError, RuntimeInputError

BATCH = (torch.randn(4, 8), torch.arange(4))
LOSS = torch.nn.functional.cross_entropy
on_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))


@pytest.fixture(scope="module")
def parallel() -> Iterator[autopar.ParallelModel]:
    yield autopar.parallelize(model(), "1xcpu", example_inputs=BATCH, plan={"dp": 1}, loss_fn=LOSS)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.to(torch.device("cpu")),
        lambda model: model.cpu(),
        lambda model: model.to(torch.zeros(1)),
        lambda model: model.float(),
        lambda model: model.to(device="cpu", dtype=torch.float32, non_blocking=True),
    ],
)
def test_a_move_to_where_it_is_changes_nothing(move: Callable[[Any], Any], parallel: autopar.ParallelModel) -> None:
    before = dict(parallel.named_parameters())
    assert move(parallel) is parallel
    after = dict(parallel.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items()) and after.keys() == before.keys()
    assert bool(parallel.forward_backward(BATCH).isfinite())


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda model: model.to("meta"), r"on cpu and cannot move to meta; .*leave the move out"),
        pytest.param(lambda model: model.cuda(), "stays on cpu: .*; .*leave the move out", marks=on_cpu_only),
        pytest.param(lambda model: model.to("cuda:0"), "stays on cpu: .*; .*leave the move out", marks=on_cpu_only),
        (lambda model: model.half(), r"parameters of torch\.float32 and cannot change to torch\.float16; .*precision"),
        (lambda model: model.to(torch.bfloat16), r"cannot change to torch\.bfloat16; convert the model before"),
    ],
)
def test_another_move_is_refused(move: Callable[[Any], Any], message: str, parallel: autopar.ParallelModel) -> None:
    with pytest.raises(RuntimeInputError, match=f"(?s){message}"):
        move(parallel)
    assert {parameter.device.type for parameter in parallel.parameters()} == {"cpu"}


def test_the_compiler_is_called_by_a_method(parallel: autopar.ParallelModel) -> None:
    with pytest.raises(RuntimeInputError, match=r"call parallel\.compile\(\) instead"):
        torch.compile(parallel)
    assert isinstance(torch.compile(model()), torch.nn.Module)  # other modules compile as ever


@on_cpu_only
@pytest.mark.parametrize("cluster", ["1xh100", "8xa100-80gb"])
def test_a_cluster_of_gpus_on_a_machine_without(cluster: str) -> None:
    with pytest.raises(ClusterError, match=r"is of GPUs, and torch sees none on this machine .*such as '2xcpu'"):
        autopar.parallelize(model(), cluster, example_inputs=BATCH, loss_fn=LOSS)


def test_a_rank_without_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ClusterError, match="torch sees 2 on this machine"):
        autopar.parallelize(model(), "8xh100", example_inputs=BATCH, loss_fn=LOSS)
