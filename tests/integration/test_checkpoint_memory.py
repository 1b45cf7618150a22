"""No process holds the whole model while weights are imported, exported, saved or loaded."""

import json
from pathlib import Path
from typing import Any

import memory_ranks
import pytest
import torch
from safetensors.torch import save_file
from suites import thinned

from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.parameters.state_loading import open_state

WIDTH = 512
SHARD_BYTES = 24 << 20
BLOCK_BYTES = 16 * WIDTH**2 * 4
SLACK = 8 << 20  # the capture's, and messages of ranks


def written(folder: Path) -> tuple[int, int]:
    """Weights in safetensors of some megabytes each, with an index; all bytes, and those of the largest tensor."""
    shapes = {name: tuple(value.shape) for name, value in memory_ranks.on_meta(WIDTH).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}]
    total = largest = 0
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator) * 0.02
        if sum(one.nbytes for one in files[-1].values()) + value.nbytes > SHARD_BYTES:
            files.append({})
        files[-1][name] = value
        total, largest = total + value.nbytes, max(largest, value.nbytes)
    folder.mkdir()
    weight_map = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total, largest


WISHES: list[dict[str, Any]] = [{"dp": 4, "zero": 3}, {"tp": 2, "dp": 2, "zero": 3}, {"pp": 2, "tp": 2}]


@pytest.mark.parametrize("wish", thinned(WISHES, keep=WISHES[:1]))
def test_peaks(wish: dict[str, Any], tmp_path: Path) -> None:
    """An import takes the rank's part and one block, an export three tensors, a save and a load less than one.

    If rank 0 alone holds the model, each rank takes its part and two blocks.
    """
    total, largest = written(tmp_path / "weights")
    assert total > 140 << 20
    with Ranks(4, timeout_s=600) as ranks:  # new ones: memory that other tests freed would be taken first
        results = ranks.run("memory_ranks:peaks", 4, wish, WIDTH, str(tmp_path / "weights"), str(tmp_path))
    for found in results:
        assert 0.2 * total < found["part"] < 0.3 * total
        assert 0.8 * found["part"] < found["import"] < found["part"] + BLOCK_BYTES + SLACK < 0.5 * total, results
        assert 0.8 * found["part"] < found["sent"] < found["part"] + 2 * BLOCK_BYTES + SLACK < 0.55 * total, results
        assert found["export"] < 3 * largest + SLACK, results
        assert max(found["save"], found["load"]) < largest + SLACK, results
    first, again = open_state(tmp_path / "weights"), open_state(tmp_path / "exported")
    assert first.keys() == again.keys()
    assert all(torch.equal(one.load(), again[name].load()) for name, one in first.items())
