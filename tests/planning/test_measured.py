"""Measured steps and traces correct a profile by terms, shrunk, of the same device, precision and engine only."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cost_model.fit.profile_comparison import predicted_parts
from autopar.cost_model.interval import SHRINKAGE
from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile import MOST_OF_PEAK
from autopar.cost_model.published.estimate import estimate_rows
from autopar.cost_model.published.row import Row, RowEstimate
from autopar.errors import InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.planning.measured import corrected_by_steps, profile_for

SIZES: dict[str, Any] = {
    "layers": 32, "hidden": 4096, "ffn_hidden": 14336, "n_heads": 32, "n_kv_heads": 8,
    "vocab": 128256, "gated_mlp": True, "seq_len": 4096, "gpu_type": "H100-SXM", "num_gpus": 8, "gpus_per_node": 8,
    "tp": 2, "pp": 1, "dp": 4, "zero": 3, "micro_batch": 1, "global_batch": 16, "precision": "bf16",
    "engine": "autopar", "recompute": "none",
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


def test_a_slower_step_slows_the_terms_of_its_time(tmp_path: Path) -> None:
    usual = predicted_s()
    path = written(tmp_path, {"step_time_s": 1.3 * usual})
    made = corrected_by_steps(path, CLUSTER, engine=ENGINE, precision="bf16")
    before = profile_for(None, None, CLUSTER, "bf16")
    assert before is None
    assert made.steps == 1
    (note,) = [note for note in made.notes if "run0 +30%" in note]
    assert note.startswith("times of profile h100 are scaled, computing by 1.2")
    how = large()
    model = how.pop("model")
    plain, corrected = (autopar.estimate(model, CLUSTER, {"zero": 3}, measured=one, **how) for one in (None, path))
    fixed = plain.other_s["fixed costs of a step"]
    assert (corrected.step_s - fixed) / (plain.step_s - fixed) == pytest.approx(1.3**SHRINKAGE, rel=0.05)
    low, high = corrected.step_interval_s
    assert high / low < plain.step_interval_s[1] / plain.step_interval_s[0]


def test_slow_links_are_told_from_slow_computing(tmp_path: Path) -> None:
    """One layout waits for links between hosts, the other does not. Only the first takes longer than predicted."""
    cluster = ClusterSpec.preset("64xh100")
    far = {"num_gpus": 64, "dp": 64, "tp": 1, "global_batch": 64, "seq_len": 512}
    near = {"tp": 1, "dp": 8}
    rows = (far | {"step_time_s": 1.5 * predicted_s(**far)}, near | {"step_time_s": predicted_s(**near)})
    made = corrected_by_steps(written(tmp_path, *rows), cluster, engine=ENGINE, precision="bf16")
    assert made.steps == 2
    base = cluster_machine(cluster, ENGINE, mechanisms(), precision="bf16").profile
    computing = base.efficiency_of("bfloat16") / made.efficiency_of("bfloat16")
    between = base.link("inter_host").usual.efficiency / made.link("inter_host").usual.efficiency
    assert between > 1.1 > 1.05 > computing


def test_more_steps_are_believed_more(tmp_path: Path) -> None:
    rows = [{"seq_len": 1024 * n, "step_time_s": 1.3 * predicted_s(seq_len=1024 * n)} for n in (4, 8, 16, 32)]
    slower = []
    for count in (1, 4):
        made = corrected_by_steps(written(tmp_path, *rows[:count]), CLUSTER, engine=ENGINE, precision="bf16")
        slower.append(device_profile("h100-sxm").efficiency_of("bfloat16") / made.efficiency_of("bfloat16"))
    assert 1.1 < slower[0] < slower[1] < 1.3


def test_a_device_with_a_power_of_its_own_is_corrected_too(tmp_path: Path) -> None:
    """The profile says more for an H20 than a device reaches. The correction starts from what the H20 reaches."""
    row = {"gpu_type": "H20", "step_time_s": 1.3 * predicted_s(gpu_type="H20")}
    made = corrected_by_steps(written(tmp_path, row), ClusterSpec.preset("8xh20"), engine=ENGINE, precision="bf16")
    assert made.watts_per_tflops is None
    assert made.efficiency_of("bfloat16") == pytest.approx(MOST_OF_PEAK / 1.3**SHRINKAGE, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [{"gpu_type": "A100-80"}, {"precision": "fp16"}, {"engine": "fsdp"}, {"step_time_s": ""}],
    ids=str,
)
def test_other_steps_do_not_count(changes: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, {"step_time_s": 2.0} | changes)
    with pytest.raises(InputError, match="no measured step of device h100-sxm, precision bf16 and engine autopar"):
        corrected_by_steps(path, CLUSTER, engine=ENGINE, precision="bf16")


# ---- traces ----


DEGREES = {"tp": 2, "dp_shard": 4, "zero": 3, "micro_batch": 2048, "accumulate": 8}


def traced(folder: Path, slower: dict[str, float], **about: Any) -> Path:
    """A trace of the large model on eight devices. Each term takes `slower` times as long as predicted."""
    how = large()
    made = autopar.estimate(how.pop("model"), CLUSTER, DEGREES, **how)
    events, end_us = [], 0.0
    for name, seconds in predicted_parts(made).items():
        length_us = 1e6 * seconds * slower.get(name, 1.0)
        args = {"call": 0} if name == "compute" else {}
        if name not in ("idle", "other"):
            events.append(
                {"ph": "X", "pid": 0, "cat": name, "name": name, "ts": end_us, "dur": length_us, "args": args}
            )
            end_us += length_us
    said = {"world_size": 8, "degrees": DEGREES, "backend": "nccl", "parameters": made.num_parameters}
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "otherData": said | about}))
    return path


def corrected_to(path: Path, ask: Any = autopar.estimate, **how: Any) -> Any:
    asked = large() | {"measured": path} | how
    return ask(asked.pop("model"), asked.pop("cluster", CLUSTER), **asked)


def test_a_trace_corrects_its_terms_alone(tmp_path: Path) -> None:
    before = corrected_to(tmp_path / "none", measured=None, plan=DEGREES)
    made = corrected_to(traced(tmp_path, {"tp": 1.5}), plan=DEGREES)
    assert made.compute_s["matrix products"] == before.compute_s["matrix products"]
    tp, usual = (sum(c.exposed_s for c in one.collectives if c.mesh_dim == "tp") for one in (made, before))
    assert tp / usual == pytest.approx(1.5**SHRINKAGE, rel=0.1)
    (note,) = [note for note in made.assumptions if "trace.json" in note]
    assert note.startswith("times of profile h100 are scaled, links in a host by 1.3")
    low, high = made.step_interval_s
    assert high / low < before.step_interval_s[1] / before.step_interval_s[0]


def test_a_trace_of_some_devices_corrects_the_whole_cluster(tmp_path: Path) -> None:
    path, far = traced(tmp_path, {"compute": 1.5}), ClusterSpec.preset("64xh100")
    wanted = {"cluster": far, "plan": {"dp": 64, "zero": 3}}
    made, before = (corrected_to(path, measured=one, **wanted) for one in (path, None))
    assert sum(made.compute_s.values()) / sum(before.compute_s.values()) == pytest.approx(1.5**SHRINKAGE, rel=0.03)


def test_a_search_starts_from_a_traced_step(tmp_path: Path) -> None:
    path = traced(tmp_path, {"compute": 1.5})
    made, before = (corrected_to(path, autopar.plan, measured=one, global_batch=131072) for one in (path, None))
    assert 1.15 < made.best.step_s / before.best.step_s < 1.5
    assert any("trace.json" in one for one in made.assumptions)


@pytest.mark.parametrize(
    "about, how, error",
    [
        ({"parameters": 7}, {}, "parameters"),
        ({"degrees": None}, {}, "does not state the plan"),
        ({"degrees": DEGREES | {"tp": 0}}, {}, "at least 1"),
        ({"backend": "gloo"}, {}, "a step of CPU ranks"),
        ({}, {"engine": "fsdp", "plan": {"zero": 3}}, "fsdp is priced"),
        ({}, {"precision": "fp8"}, "a step in bf16, and fp8 is priced"),
        ({}, {"cluster": ClusterSpec.preset("4xh100")}, "no part of cluster 4xh100 has as many devices"),
    ],
    ids=str,
)
def test_another_step_is_refused(about: dict[str, Any], how: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, PlanError), match=error):
        corrected_to(traced(tmp_path, {}, **about), **how)


def test_a_search_starts_from_the_corrected_profile(tmp_path: Path) -> None:
    path = written(tmp_path, {"step_time_s": 1.5 * predicted_s()})
    how = large()
    model = how.pop("model")
    plain, corrected = (autopar.plan(model, CLUSTER, measured=one, global_batch=131072, **how) for one in (None, path))
    assert plain.best is not None and corrected.best is not None
    assert 1.2 < corrected.best.step_s / plain.best.step_s < 1.5
    assert any("run0 +50%" in one for one in corrected.assumptions)
