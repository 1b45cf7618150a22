"""`autopar.parallelize` as torchrun runs it: where weights, inputs and plans come from; losses of the single device."""

import json
from pathlib import Path

import forked
import pytest
import torchrun
from suites import long

CASES = {
    "cpu model",
    "state dict, mapping",
    "safetensors, plan",
    "path of a plan",
    "own initialisation",
    "dict inputs",
    "tuple inputs",
    "mean of squares",
    "different weights",
}
SOME = {1: ("cpu model", "tuple inputs"), 2: tuple(CASES), 4: ("safetensors, plan", "mean of squares")}


@pytest.mark.parametrize("world_size", (1, 2, long(4)))
def test_losses_equal_the_single_device(world_size: int, tmp_path: Path) -> None:
    """One rank by itself, two under torchrun, four as forks."""
    script, arguments = torchrun.HERE / "torchrun_parallelize.py", [str(world_size), *SOME[world_size]]
    if world_size == 1:
        forked.alone(script, [str(tmp_path), *arguments], tmp_path)
    elif world_size == 2:
        code, output = torchrun.run(world_size, script.name, tmp_path, *arguments)
        assert code == 0, output[-4000:]
    else:
        forked.run(script, [str(tmp_path), *arguments], tmp_path, world_size)
    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(world_size)]
    assert results[0]["losses"].keys() == set(SOME[world_size])
    for name, (found, reference) in results[0]["losses"].items():
        assert found == pytest.approx(reference, rel=1e-5), name
        assert all(other["losses"][name][0] == found for other in results), name  # bit-equal on all ranks
    assert results[0]["derived"] == [2 * world_size, 128]
