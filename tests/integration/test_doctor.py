"""`autopar doctor` on gloo ranks: a cluster that is right, a broken conversion, a slow rank, one that fails."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli.app import app_of
from autopar.commands.diagnosis import Diagnosis
from autopar.errors import RankError
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.measure.doctor_checks import CONVERSION_CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], Ranks]]:
    """Worlds as the command starts them. torch's comparison of collectives takes a message for one of both ranks."""
    made: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        if size not in made or not made[size].is_open:
            made[size] = Ranks(size, timeout_s=600, checked=False)
        return made[size]

    yield of_size
    for world in made.values():
        world.close()


def diagnosed(ranks: Ranks, who: int, fault: str) -> Diagnosis:
    found: list[Diagnosis] = ranks.run("doctor_ranks:with_fault", ranks.world_size, who, fault)
    assert all(one == found[0] for one in found)
    return found[0]


def test_every_row_of_the_table_is_checked() -> None:
    from autopar.lowering.conversions import CONVERSIONS

    assert [(row.function, row.num_dims) for row in CONVERSION_CASES] == [
        (c.function, c.num_dims) for c in CONVERSIONS.values()
    ]
    assert [row.name.rstrip("'") for row in CONVERSION_CASES] == [
        f"{c.source} -> {c.target}" for c in CONVERSIONS.values()
    ]


def test_ranks_that_are_right_and_one_that_is_slow(four_ranks: Ranks) -> None:
    found = diagnosed(four_ranks, 2, "slow")
    assert found.passed, found.checks
    names = {f"conversion {row.name}" for row in CONVERSION_CASES} | {"FSDP2", "pipeline of two stages"}
    assert {check.name for check in found.checks} == names
    groups, dtypes = 3, 3
    assert all(c.num_compared >= 2 * groups * dtypes for c in found.checks if c.name.startswith("conversion"))
    assert all(c.error == 0 for c in found.checks if c.name.startswith("conversion"))
    matmuls = [f for f in found.figures if f.name.startswith("matmul")]
    assert {f.name for f in matmuls} >= {"matmul float32", "matmul float64"}
    for figure in matmuls:
        # ranks that share cores are really slow at times, but not a tenth as fast
        assert {rank for rank, part in figure.slow.items() if part < 0.1} == {2}, figure
        assert figure.worst[0] == 2 and None not in figure.of_ranks and figure.promised is not None
    assert found.slow_ranks[2].keys() >= {f.name for f in matmuls}
    kinds = {f.name.partition(" of ")[0] for f in found.figures}
    assert kinds >= {"memory copy", "all-reduce", "message"}
    assert all(None not in f.of_ranks for f in found.figures)


def test_a_broken_conversion_is_found(two_ranks: Ranks) -> None:
    found = diagnosed(two_ranks, 1, "broken")
    failed = {check.name: check for check in found.checks if not check.passed}
    # the pipeline has no tensor dimension, FSDP2 gathers by itself: neither uses the conversion
    rows = {"P -> S", "S -> R", "S -> I", "I -> S"}
    assert failed.keys() == {f"conversion {row}" for row in rows}
    assert all(check.rank == 1 and check.error and check.where for check in failed.values())
    assert "backward" in failed["conversion P -> S"].where and "forward" in failed["conversion S -> R"].where
    assert not found.passed


def test_a_rank_that_fails_is_named_with_the_check(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1 failed: .*conversion P -> S.*a planted fault") as caught:
        diagnosed(two_ranks, 1, "raise")
    assert caught.value.rank == 1


def test_the_command() -> None:
    """JSON on stdout and nothing else."""
    result = CliRunner().invoke(app_of(), ["doctor", "--ranks", "2", "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["passed"] and len(found["ranks"]) == 2 and found["backend"] == "gloo"


@pytest.mark.long
def test_the_command_under_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    module = [*launcher, "-m", "autopar", "doctor"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    result = subprocess.run([sys.executable, *module, "--json"], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    assert found["passed"] and len(found["ranks"]) == 2 and found["backend"] == "gloo"
