"""Every example runs at a tiny size, and learns."""

import json
import re
from pathlib import Path

import forked
import pytest
from suites import long

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [("2d", "tp 2 × dp_shard 2 = 4 ranks, ZeRO-3"), long("3d", "pp 2 × tp 2 × dp_shard 2 = 8 ranks, ZeRO-3")],
)
def test_demo(tmp_path: Path, plan: str, sizes: str) -> None:
    small = ["--plan", plan, "--steps", "6", "--check-steps", "3", "--layers", "2", "--hidden", "64", "--seq-len", "32"]
    shown = forked.run(EXAMPLES / "demo.py", [*small, "--out", str(tmp_path / "out")], tmp_path)
    assert sizes in shown
    assert "tokens/s" in shown
    assert "first 3 steps against one device" in shown
    found = json.loads((tmp_path / "out" / "losses.json").read_text())
    assert [len(found[key]) for key in ("loss", "seconds", "single_device_loss")] == [6, 6, 3]
    assert found["loss"][:3] == pytest.approx(found["single_device_loss"], abs=1e-5)
    assert found["loss"][-1] < found["loss"][0]
    pytest.importorskip("matplotlib")
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_demo_in_low_precision(tmp_path: Path) -> None:
    """The loss is within 2 % of float32 on one device."""
    sizes = ["--steps", "12", "--check-steps", "12", "--layers", "2", "--hidden", "64", "--seq-len", "32"]
    shown = forked.run(EXAMPLES / "demo.py", ["--precision", "bf16", *sizes, "--out", str(tmp_path / "out")], tmp_path)
    assert "first 12 steps against one device: in float32, relative difference of the mean loss of the last 12" in shown
    found = json.loads((tmp_path / "out" / "losses.json").read_text())
    assert found["loss"] == pytest.approx(found["single_device_loss"], rel=0.02)
    assert found["loss"] != pytest.approx(found["single_device_loss"], rel=1e-6)


@pytest.mark.long  # the training script of the documents is killed and resumed in the short suite
@pytest.mark.parametrize("check", [False, True], ids=["resumed", "beside a whole run"])
def test_long_run(tmp_path: Path, check: bool) -> None:
    """The ranks are killed. The run goes on from its checkpoint, on the next sample, under another plan."""
    sizes = ["--layers", "2", "--width", "64", "--seq-len", "32", "--batch", "8", "--steps", "8"]
    options = [*sizes, "--save-every", "2", "--kill", "5", *(["--check"] if check else [])]
    shown = forked.under_torchrun(EXAMPLES / "long_run.py", options, tmp_path)
    assert "all ranks were killed after step 5" in shown
    assert "loaded the checkpoint of step 4" in shown
    run = tmp_path / "long_run_output"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert logged[5][1] == pytest.approx(logged[4][1], rel=0.005)  # the same samples and weights, in bfloat16
    if check:
        worst = re.search(r"8 losses with and without the kill differ by at most (\S+) ", shown)
        assert worst is not None
        assert float(worst[1]) < 0.02
    exported = exported_loss(run / "exported")
    assert exported < logged[0][1]


def exported_loss(folder: Path) -> float:
    """The loss of an exported model on the first bytes of the text that the examples learn."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([list(b"import os, sys, re\n\ndef main(self):")])
    loss: float = model(input_ids=ids, labels=ids).loss.item()
    return loss


@pytest.mark.parametrize("tp", [long("1"), "2"])
def test_bring_your_own_model(tmp_path: Path, tp: str) -> None:
    shown = forked.run(EXAMPLES / "bring_your_own_model.py", ["--tp", tp, "--steps", "21"], tmp_path, 2)
    found = losses(shown)
    assert found[-1] < 0.8 * found[0]
    assert ("all_reduce_to_invariant" in shown) == (tp == "2")  # the generated code is shown


@pytest.mark.parametrize("rule", [True, long(False)], ids=["rule", "no rule"])
def test_own_operator(tmp_path: Path, rule: bool) -> None:
    """With its rule the operator lies between column and row products; without it, its operands are gathered."""
    options = ["--tp", "2", "--steps", "41", *([] if rule else ["--no-rule"])]
    shown = forked.run(EXAMPLES / "own_operator.py", options, tmp_path, 2)
    found = losses(shown)
    assert found[-1] < 0.8 * found[0]
    assert ("gradients too" in shown) == rule
    layer = shown[shown.index("def forward") : shown.index("\nstep ")]
    assert "torch.ops.own_operator.gated.default(" in layer
    assert ("all_gather" in layer) == (not rule)


def test_a_public_loop_needs_eight_lines_for_ranks(tmp_path: Path) -> None:
    script = EXAMPLES / "char_gpt.py"
    assert script.read_text().count("  # ranks\n") <= 8
    options = ["--steps", "20"]
    alone = forked.alone(script, options, tmp_path)
    ranks = forked.run(script, options, tmp_path, 2)
    expected, found = (re.findall(r"(?:loss|evaluation) ([\d.]+)", text) for text in (alone, ranks))
    assert len(expected) == 21
    assert list(map(float, found)) == pytest.approx(list(map(float, expected)), abs=2e-4)
