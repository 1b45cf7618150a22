"""Measured steps correct a profile: by the shrunk mean ratio, of the same device, precision and engine only."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cost_model.interval import SHRINKAGE
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.published.estimate import estimate_rows
from autopar.cost_model.published.row import Row, RowEstimate
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec
from autopar.planning.measured import corrected_by_steps, profile_for

SIZES: dict[str, Any] = {
    "model": "Llama 3.1 8B", "layers": 32, "hidden": 4096, "ffn_hidden": 14336, "n_heads": 32, "n_kv_heads": 8,
    "vocab": 128256, "gated_mlp": True, "seq_len": 4096, "gpu_type": "H100-SXM", "num_gpus": 8, "gpus_per_node": 8,
    "tp": 2, "pp": 1, "dp": 4, "zero": 3, "micro_batch": 1, "global_batch": 16, "precision": "bf16",
    "framework": "autopar", "recompute": "none",
}  # fmt: skip
CLUSTER, ENGINE = ClusterSpec.preset("8xh100"), engine_named("autopar")


def predicted_s(**changes: Any) -> float:
    (found,) = estimate_rows([Row(id="r", **(SIZES | changes))])
    assert isinstance(found, RowEstimate)
    return found.seconds


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", *SIZES, "step_time_s"])
        writer.writeheader()
        for number, changes in enumerate(rows):
            writer.writerow(SIZES | {"id": f"run{number}"} | changes)
    return path


def large() -> dict[str, Any]:
    """A model whose products take most of a step, and its batch."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, dtype=torch.bfloat16) for _ in range(4)))
        batch = tuple(torch.empty(16384, 8192, dtype=torch.bfloat16) for _ in range(2))
    return {"model": model, "example_inputs": batch, "loss_fn": torch.nn.functional.mse_loss}


def test_a_slower_step_slows_all_times_by_its_shrunk_ratio(tmp_path: Path) -> None:
    usual = predicted_s()
    path = written(tmp_path, {"step_time_s": 1.3 * usual})
    made = corrected_by_steps(path, CLUSTER, engine=ENGINE, precision="bf16")
    before = profile_for(None, None, CLUSTER, "bf16")
    assert before is None
    assert made.steps == 1
    (note,) = [note for note in made.notes if "run0 +30%" in note]
    assert f"scaled by {1.3**SHRINKAGE:.3f}" in note
    how = large()
    model = how.pop("model")
    plain, corrected = (autopar.estimate(model, CLUSTER, {"zero": 3}, measured=one, **how) for one in (None, path))
    fixed = plain.other_s["fixed costs of a step"]
    assert (corrected.step_s - fixed) / (plain.step_s - fixed) == pytest.approx(1.3**SHRINKAGE, rel=0.02)
    low, high = corrected.step_interval_s
    assert high / low < plain.step_interval_s[1] / plain.step_interval_s[0]


def test_several_steps_count_by_the_mean_of_their_logarithms(tmp_path: Path) -> None:
    usual, longer = predicted_s(), predicted_s(seq_len=8192)
    rows = ({"step_time_s": 1.2 * usual}, {"seq_len": 8192, "step_time_s": 0.9 * longer})
    made = corrected_by_steps(written(tmp_path, *rows), CLUSTER, engine=ENGINE, precision="bf16")
    assert made.steps == 2
    assert any(f"scaled by {(1.2 * 0.9) ** (SHRINKAGE / 2):.3f}" in note for note in made.notes)


@pytest.mark.parametrize(
    "changes",
    [{"gpu_type": "A100-80"}, {"precision": "fp16"}, {"framework": "torchtitan"}, {"step_time_s": ""}],
    ids=str,
)
def test_other_steps_do_not_count(changes: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, {"step_time_s": 2.0} | changes)
    with pytest.raises(InputError, match="no measured step of device h100-sxm, precision bf16 and engine autopar"):
        corrected_by_steps(path, CLUSTER, engine=ENGINE, precision="bf16")


def test_a_search_starts_from_the_corrected_profile(tmp_path: Path) -> None:
    path = written(tmp_path, {"step_time_s": 1.5 * predicted_s()})
    how = large()
    model = how.pop("model")
    plain, corrected = (autopar.plan(model, CLUSTER, measured=one, global_batch=131072, **how) for one in (None, path))
    assert plain.best is not None and corrected.best is not None
    assert 1.2 < corrected.best.step_s / plain.best.step_s < 1.5
    assert any("run0 +50%" in one for one in corrected.assumptions)
