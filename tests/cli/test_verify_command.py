"""`autopar verify`: ranks are started, the table and the JSON, and plans that do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from run import autopar, refused

from autopar.ir.plan import Plan

pytest.importorskip("transformers")
SMALL = ("--layers", "2", "--hidden", "64", "--seq-len", "16")


@pytest.fixture(scope="module")
def plan_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    made = autopar("plan", "llama3-8b", "-c", "2xcpu", "--tp", "2", "--out", str(path), *SMALL)
    assert made.exit_code == 0, made.stderr
    return path


def test_verify_passes_and_says_where_the_worst_is(plan_of_two: Path) -> None:
    sizes = ("--layers", "2", "--hidden", "64", "--steps", "2", "--json")
    result = autopar("verify", "llama3-8b", "--world-size", "2", "--plan", str(plan_of_two), *sizes)
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    assert set(report) == {"passed", "world_size", "plan", "quantities", "notes"}
    assert (report["passed"], report["world_size"]) == (True, 2)
    assert report["plan"] == json.loads(plan_of_two.read_text())
    names = {quantity["name"] for quantity in report["quantities"]}
    assert {"loss", "outputs", "gradients", "clip norm", "parameters after AdamW"} <= names
    for quantity in report["quantities"]:
        assert set(quantity) >= {"name", "max_error", "where", "tolerance", "limit", "passed"}
        assert quantity["passed"] and 0 <= quantity["max_error"] <= quantity["limit"]


@pytest.mark.parametrize("passed", [True, False])
def test_table_and_exit_status(monkeypatch: pytest.MonkeyPatch, plan_of_two: Path, passed: bool) -> None:
    from autopar.commands import verify
    from autopar.runtime.verify.error_metrics import Quantity
    from autopar.runtime.verify.verify import Report

    def instead(spec: str, **options: Any) -> Report:
        found = 1e-12 if passed else 0.5
        worst = Quantity(name="gradients", max_error=found, where="lm_head.weight", tolerance=1e-9, limit=1e-9)
        return Report(plan=Plan.load(plan_of_two), quantities=(worst,))

    monkeypatch.setattr(verify, "verify", instead)
    result = autopar("verify", "gpt2", "-n", "2")
    assert result.exit_code == (0 if passed else 1)
    assert "lm_head.weight" in result.stdout
    assert ("passed" if passed else "FAILED: gradients") in result.stdout


def test_plan_for_another_world_model_or_schema(tmp_path: Path, plan_of_two: Path) -> None:
    plan = str(plan_of_two)
    assert "is for 2 ranks" in refused("verify", "llama3-8b", "-n", "4", "--plan", plan)
    assert "made for model llama3-8b, not gpt2" in refused("verify", "gpt2", "-n", "2", "--plan", plan)
    assert "--tp" in refused("verify", "llama3-8b", "-n", "2", "--plan", plan, "--tp", "2")
    other = tmp_path / "other.json"
    for change, says in (
        ({"version": 99}, "schema version 99"),
        ({"fingerprint": 7, "blcks": []}, "did you mean 'blocks'"),
        ({"degrees": {"tp": True, "zro": 1}}, "degrees.zro: unknown key"),
    ):
        other.write_text(json.dumps(json.loads(plan_of_two.read_text()) | change))
        assert says in refused("verify", "llama3-8b", "-n", "2", "--plan", str(other))
    for text in ('{"version": 1, "version": 1}', "[" * 100_000, '{"version": NaN}', "\x00\x01", ""):
        other.write_text(text)
        assert "is not JSON" in refused("verify", "llama3-8b", "-n", "2", "--plan", str(other))


@pytest.mark.parametrize(("layers", "says"), [("3", "3 of shape [64, 64] here"), ("2", "[512, 128] here")])
def test_plan_of_another_model_is_refused_before_ranks_start(plan_of_two: Path, layers: str, says: str) -> None:
    hidden = "64" if layers == "3" else "128"
    message = refused(
        "verify", "llama3-8b", "-n", "2", "--plan", str(plan_of_two), "--layers", layers, "--hidden", hidden
    )
    assert says in message and "plan again" in message, message


def test_a_plan_of_a_float64_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check in float64 takes its weights as they are. In another dtype it says why the plan does not fit."""
    monkeypatch.chdir(Path(__file__).parent)
    path = str(tmp_path / "plan.json")
    made = autopar("plan", "cli_models:double", "-c", "2xcpu", "--tp", "2", "--out", path)
    assert made.exit_code == 0, made.stderr
    result = autopar("verify", "cli_models:double", "-n", "2", "--plan", path)
    assert result.exit_code == 0 and "passed" in result.stdout, result.stderr
    message = refused("verify", "cli_models:double", "-n", "2", "--plan", path, "--dtype", "float32")
    assert "the factory makes float64 weights, and this check takes float32 ones: give the dtype float64" in message
