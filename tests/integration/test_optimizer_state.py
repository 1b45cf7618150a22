"""The state of optimizers on gloo ranks: counted bytes are the predicted ones, and state in files has equal bits."""

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from priced_models import GPT2, LLAMA, RANKS, case, planned_case
from state_ranks import num_bytes
from step_traffic import run_stages
from suites import long, thinned

from autopar.errors import InputError, RuntimeInputError
from autopar.ir.optimizers import OPTIMIZERS, OwnPart
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.dry_run.memory import memory_of, optimizer_bytes
from autopar.runtime.dry_run.memory import trained as trained_names
from autopar.runtime.dry_run.rank_view import rank_view
from autopar.runtime.offload.state_files import keep_state_in_files, mapped_file, needed_bytes

SPLIT = case(LLAMA, tp=2, dp=2, zero=3, accumulate=2)
PLANS = (SPLIT, case(GPT2, tp=2, dp=2, zero=1), case(LLAMA, dp=4, zero=2), case(LLAMA, pp=2, tp=2, micro_batches=2))
RUN_SPLIT = [name for name, one in OPTIMIZERS.items() if one.runs_split]
COUNTED = [(one, name) for one in PLANS for name in RUN_SPLIT]


@pytest.mark.parametrize(
    ("one", "name"),
    thinned(COUNTED, keep=COUNTED[3:5]),
    ids=lambda value: getattr(value, "name", value),
)
def test_counted_state_is_the_predicted_state(one: Any, name: str, worlds: Callable[[int], Ranks]) -> None:
    program, plan = planned_case(one)
    plan = replace(plan, degrees=replace(plan.degrees, optimizer=name))
    for rank, counted in enumerate(worlds(RANKS).run("state_ranks:held_state", one, plan, name)):
        setting = rank_view(program, plan, rank)
        assert counted == sum(optimizer_bytes(setting, run_stages(setting)).values()), f"rank {rank}"


ADAPTERS, FROZEN = "integration_models:adapters", "integration_models:frozen"
BESIDE_FROZEN = [
    case(spec, **wish, **({"precision": precision} if precision else {}))
    for spec in (ADAPTERS, FROZEN)
    for wish in (
        {"dp": 4, "zero": 0}, {"dp": 4, "zero": 1}, {"dp": 4, "zero": 2}, {"dp": 4, "zero": 3}, {"tp": 4},
        {"tp": 2, "dp": 2, "zero": 3}, {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 2},
    )
    for precision in (None, "bf16")
]  # fmt: skip


@pytest.mark.parametrize(
    "one", thinned(BESIDE_FROZEN, keep=(BESIDE_FROZEN[7], BESIDE_FROZEN[11])), ids=lambda one: one.name
)
def test_frozen_parameters_are_held_as_they_are_counted(one: Any, worlds: Callable[[int], Ranks]) -> None:
    pytest.importorskip("peft")
    program, plan = planned_case(one)
    for rank, held in enumerate(worlds(RANKS).run("state_ranks:held_bytes", one, plan)):
        setting = rank_view(program, plan, rank)
        memory = memory_of(setting, run_stages(setting))
        moments = 2 * sum(setting.gradient_bytes(name) for name in trained_names(setting, run_stages(setting)))
        expected = (memory.parameter_bytes, memory.gradient_bytes, moments)
        assert held == pytest.approx(expected, rel=0.02), f"rank {rank}"


def test_every_other_optimizer_is_counted_on_whole_parameters() -> None:
    assert [name for name in OPTIMIZERS if name not in RUN_SPLIT] == ["adamw8bit"]


@pytest.mark.parametrize("shape", [(64, 64), (4096,), (5000,), (63, 64), (3, 512, 16)])
def test_counted_state_in_8_bits(shape: tuple[int, ...]) -> None:
    optim = pytest.importorskip("torchao.optim")
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.ones(shape)
    own = optim.AdamW8bit([parameter], lr=1e-3)
    torch.compiler.set_stance("force_eager")  # it compiles its step
    try:
        own.step()
    finally:
        torch.compiler.set_stance("default")
    counted = sum(num_bytes(value) for value in own.state[parameter].values())
    part = OwnPart(shape=shape, num_elements=parameter.numel(), element_bytes=4, is_hidden=True)
    assert counted == OPTIMIZERS["adamw8bit"].held_bytes(part)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("AdamW", {"lr": 1e-2}), long("SGD", {"lr": 1e-2, "momentum": 0.9}), long("Adafactor", {"lr": 1e-2})],
)
def test_state_in_files_has_equal_bits(kind: str, options: dict[str, Any], worlds: Callable[[int], Ranks]) -> None:
    _, plan = planned_case(SPLIT)
    world = worlds(RANKS)
    given = SPLIT, plan, kind, options
    here, there = (world.run("state_ranks:trained_in_files", *given, in_files) for in_files in (False, True))
    for (weights, _, _), (own, size, names) in zip(here, there, strict=True):
        assert [name for name, value in weights.items() if not torch.equal(value, own[name])] == []
        assert size >= 4096
        assert names == []  # unlinked: nothing is left behind


def trained(size: int) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.zeros(size))
    return parameter, torch.optim.AdamW([parameter], lr=1e-2)


def test_the_state_is_a_view_of_the_file_and_takes_no_anonymous_memory(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    size = 8 * 2**20
    parameter, optimizer = trained(size)
    parameter.grad = torch.ones(size)
    assert keep_state_in_files(optimizer, tmp_path) >= 2 * 4 * size
    before = anonymous_bytes()
    optimizer.step()
    first, second = optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"]
    assert float(first[-1]) != 0
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert anonymous_bytes() - before < 4 * size  # less than one of two moments stays
    assert list(tmp_path.iterdir()) == []


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_what_is_needed_is_counted_before_the_first_step(tmp_path: Path) -> None:
    parameter, optimizer = trained(4096)
    counted = needed_bytes(optimizer)
    assert counted >= 2 * 4 * 4096
    assert optimizer.state == defaultdict(dict)
    parameter.grad = torch.ones(4096)
    optimizer.step()
    assert needed_bytes(optimizer) == counted


def test_a_full_disk_is_an_error_before_training(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no room for .* of this rank's optimizer state"):
        mapped_file(tmp_path, 2**60)
    assert list(tmp_path.iterdir()) == []
    _, optimizer = trained(4096)
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")),
        pytest.raises(InputError, match="No space left on device; free space there"),
    ):
        keep_state_in_files(optimizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_places_are_refused(tmp_path: Path) -> None:
    _, optimizer = trained(1)
    with pytest.raises(InputError, match="no such folder"):
        keep_state_in_files(optimizer, tmp_path / "absent")
    on_meta = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4, device="meta"))])
    with pytest.raises(RuntimeInputError, match="a plan of offload optimizer or parameters"):
        keep_state_in_files(on_meta, tmp_path)
