"""Every strategy's example trains at a tiny size, and its first loss equals one device's."""

import re
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from suites import long

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SMALL = ["--layers", "2", "--width", "32", "--seq-len", "16"]
CHECKED = re.compile(r"first step: loss [\d.]+, on one device [\d.]+, difference ([\de.+-]+)")


def run(name: str, folder: Path, *options: str, steps: int = 6, by: Callable[..., str] = forked.run) -> str:
    return by(EXAMPLES / f"{name}.py", [*SMALL, "--steps", str(steps), *options], folder)


def assert_learns(shown: str) -> None:
    """The first loss was compared with one device, and the last is smaller."""
    assert all(float(found) <= 1e-5 for found in CHECKED.findall(shown)) and CHECKED.search(shown)
    losses = [float(found) for found in re.findall(r"^step +\d+  loss ([\d.]+)", shown, re.MULTILINE)]
    assert losses[-1] < losses[0]


def held_out(shown: str, when: str) -> float:
    found = re.search(rf"^{when}: held-out loss ([\d.]+)", shown, re.MULTILINE)
    assert found is not None, shown
    return float(found[1])


def test_data_parallel_goes_on_under_another_zero_stage(tmp_path: Path) -> None:
    """The state saved under ZeRO-1, moments included, loads under ZeRO-3."""
    first = run("data_parallel", tmp_path, "--zero", "1", "--save", "state")
    assert_learns(first)
    assert "gradients are reduce-scattered once a step" in first
    second = run("data_parallel", tmp_path, "--zero", "3", "--load", "state")
    assert held_out(second, "loaded") == pytest.approx(held_out(first, "saved"), abs=2e-6)


def test_hybrid_sharding(tmp_path: Path) -> None:
    shown = run("hybrid_sharding", tmp_path)
    assert_learns(shown)
    assert "dp_shard 2 × dp_replicate 2 = 4 ranks" in shown
    assert "gradient shards are all-reduced over 2 replicas" in shown
    assert "groups that hold the whole state between them: [[0, 1], [2, 3]]" in shown
    held, whole = re.findall(r"rank 0 holds ([\d,]+) of ([\d,]+) bytes of parameters", shown)[0]
    assert 2 * int(held.replace(",", "")) == int(whole.replace(",", ""))


@pytest.mark.parametrize("sequence_parallel", [True, long(False)], ids=["sequence parallel", "not"])
def test_tensor_parallel(tmp_path: Path, sequence_parallel: bool) -> None:
    pytest.importorskip("transformers")
    option = "--sequence-parallel" if sequence_parallel else "--no-sequence-parallel"
    shown = run(
        "tensor_parallel", tmp_path, "--code", option, by=forked.run if sequence_parallel else forked.under_torchrun
    )
    assert_learns(shown)
    layer = shown[shown.index("def forward") :]
    assert ("reduce_scatter(" in layer) == sequence_parallel
    assert ("all_reduce_to_invariant(" in layer) != sequence_parallel


@pytest.mark.parametrize(
    ("degrees", "sent"),
    [(("--cp", "2", "--dp", "2"), "all_to_all("), long(("--cp", "4", "--dp", "1"), "causal_attention(")],
    ids=str,
)
def test_context_parallel(tmp_path: Path, degrees: tuple[str, ...], sent: str) -> None:
    pytest.importorskip("transformers")
    shown = run("context_parallel", tmp_path, "--code", *degrees)
    assert_learns(shown)
    assert sent in shown[shown.index("def forward") :]


@pytest.mark.parametrize(
    ("options", "sent"),
    [((), "rows_to_experts("), long(("--ep", "4", "--dispatch", "gather"), "part_of_experts(")],
    ids=str,
)
def test_expert_parallel(tmp_path: Path, options: tuple[str, ...], sent: str) -> None:
    pytest.importorskip("transformers")
    shown = run("expert_parallel", tmp_path, "--code", *options)
    assert_learns(shown)
    assert sent in shown[shown.index("def forward") :]


@pytest.mark.parametrize(
    ("schedule", "last_rank"), [long("1f1b", "1F0 1B0 1F1 1B1"), ("zbv-zero-bubble", "1F0 2F0")], ids=str
)
def test_pipeline_parallel(tmp_path: Path, schedule: str, last_rank: str) -> None:
    pytest.importorskip("transformers")
    shown = run("pipeline_parallel", tmp_path, "--schedule", schedule, "--layers", "4")
    assert_learns(shown)
    assert f"rank 1 runs {last_rank}" in shown
    assert "held-out loss" in shown


def test_recomputation(tmp_path: Path) -> None:
    shown = run("recomputation", tmp_path, "--layers", "4", "--width", "64")
    assert_learns(shown)
    pattern = r"at most ([\d.]+) MB for the backward pass"
    kept, selective, again = (float(found) for found in re.findall(pattern, shown))
    assert again < selective < 0.6 * kept
    assert "losses of the runs differ by at most 0.0e+00" in shown


@pytest.mark.long
def test_three_dimensional(tmp_path: Path) -> None:
    shown = run("three_dimensional", tmp_path, "--recompute", "full", steps=3)
    assert_learns(shown)
    assert "pp 2 × tp 2 × dp_shard 2 = 8 ranks, ZeRO-3" in shown
    assert "held-out text, from the saved state: loss" in shown
