"""`autopar.parallelize` as torchrun runs it: where weights, inputs and plans come from; losses of the single device."""

import json
from pathlib import Path

import forked
import pytest
import torchrun
from suites import thinned

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
LAUNCHED = {
    "alone": (1, ("cpu model", "tuple inputs")),
    "torchrun": (2, ("mean of squares",)),
    "two forks": (2, tuple(CASES)),
    "four forks": (4, ("safetensors, plan", "mean of squares")),
}


@pytest.mark.parametrize("launched", thinned(LAUNCHED, keep=("alone", "torchrun", "two forks")))
def test_losses_equal_the_single_device(launched: str, tmp_path: Path) -> None:
    world_size, cases = LAUNCHED[launched]
    script, arguments = torchrun.HERE / "torchrun_parallelize.py", [str(world_size), *cases]
    if launched == "alone":
        forked.alone(script, [str(tmp_path), *arguments], tmp_path)
    elif launched == "torchrun":
        code, output = torchrun.run(world_size, script.name, tmp_path, *arguments)
        assert code == 0, output[-4000:]
    else:
        forked.run(script, [str(tmp_path), *arguments], tmp_path, world_size)
    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(world_size)]
    assert results[0]["losses"].keys() == set(cases)
    for name, (found, reference) in results[0]["losses"].items():
        assert found == pytest.approx(reference, rel=1e-5), name
        assert all(other["losses"][name][0] == found for other in results), name  # bit-equal on all ranks
    assert results[0]["derived"] == ([2 * world_size, 128] if "cpu model" in cases else [])
