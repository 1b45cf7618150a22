"""Another build of the same release is no other version; another release is told."""

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar._version import public_version
from autopar.ir.plan import Plan

BATCH = (torch.zeros(4, 8), torch.zeros(4, 8))


def parallel(plan: Plan | dict[str, int]) -> autopar.ParallelModel:
    return autopar.parallelize(
        torch.nn.Linear(8, 8), "1xcpu", example_inputs=BATCH, plan=plan, loss_fn=torch.nn.functional.mse_loss
    )


@pytest.fixture
def plan() -> Iterator[Plan]:
    yield parallel({"dp": 1}).plan
    dist.destroy_process_group()  # other tests of this process need one of their own, or none


def test_the_build_is_left_out() -> None:
    assert [public_version(text) for text in ("2.13.0+cpu", "2.13.0+cu130", "2.14.1", "")] == [
        "2.13.0", "2.13.0", "2.14.1", "",
    ]  # fmt: skip


def test_a_plan_of_another_build_is_of_this_torch(plan: Plan) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        parallel(replace(plan, torch_version=f"{public_version(torch.__version__)}+cu999"))


def test_a_plan_of_another_release_is_told(plan: Plan) -> None:
    with pytest.warns(UserWarning, match=r"the plan was made with torch 2\.12\.0, this is 2\.1[3-5]\.\d+$"):
        parallel(replace(plan, torch_version="2.12.0+cpu"))


@pytest.mark.parametrize("name", ["private", "exports"])
def test_a_torch_without_a_private_name_is_told_in_one_line(name: str) -> None:
    """As another release would be."""
    lacking = {"private": "torch._ops", "exports": "torch._subclasses.fake_tensor"}[name]
    program = f"import sys, torch\nsys.modules[{lacking!r}] = type(sys)({lacking!r})\nimport autopar._torch.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "During handling" not in done.stderr
    assert re.search(
        r"InputError: autopar does not work with torch .*: cannot import name .*pip install 'torch>=2\.13", last
    )
