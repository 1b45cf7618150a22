"""`autopar estimate`: its output, and the options that it refuses before a model is built."""

import subprocess
import sys
from pathlib import Path

import pytest
from run import autopar, json_of, refused

from autopar.cli.options import big_number
from autopar.words.numbers import readable_bytes

SMALL = ("--layers", "2", "--hidden", "64", "--seq-len", "64")


def test_tables() -> None:
    pytest.importorskip("transformers")
    shown = autopar(
        *("estimate", "llama3-8b", "-c", "16xh100", *SMALL, "--tp", "2", "--zero", "1", "--global-batch", "32"),
        *("--tokens", "1e9", "--grams-co2-per-kwh", "300", "--engine", "megatron"),
    )
    assert shown.exit_code == 0, shown.output
    for text in ("MFU, HFU", "matrix products", "optimizer state", "scaling efficiency", "days", "kg of CO2"):
        assert text in shown.stdout
    assert "formula only: engine megatron" in shown.stdout and "assumed: " in shown.stdout
    assert all(len(line) <= 160 for line in shown.stdout.splitlines())


def test_json() -> None:
    pytest.importorskip("transformers")
    data = json_of("estimate", "llama3-8b", "-c", "4xcpu", *SMALL, "--pp", "2", "--global-batch", "16")
    assert data["degrees"]["pp"] == 2 and data["degrees"]["cuts"] and data["global_batch"] == 16
    exposed = sum(one["exposed_s"] for one in data["collectives"])
    assert sum(data["compute_s"].values()) + exposed + sum(data["other_s"].values()) == pytest.approx(data["step_s"])
    assert data["run"] is None and data["precision"] == "fp32" and data["fits"]


def test_a_plan_file_has_the_model_and_the_degrees(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "plan.json"
    sizes = ("--layers", "2", "--hidden", "64")
    found = json_of("plan", "gpt2", "-c", "4xh100", "--tp", "2", "--global-batch", "8", "-o", str(path), *SMALL)
    made = json_of("estimate", str(path), "-c", "4xh100", *sizes)
    assert made["step_s"] == pytest.approx(found["best"]["step_s"], rel=0.02)
    assert (made["precision"], made["sequence"], made["global_batch"], made["degrees"]["tp"]) == ("bf16", 64, 8, 2)
    assert "the plan file decides this" in refused("estimate", str(path), "-c", "4xh100", "--tp", "2")
    message = refused("estimate", str(path), "-c", "4xh100", "--layers", "3", "--hidden", "64")
    assert "made for another size" in message and "--layers, --hidden" in message
    assert "transformer.h.*.ln_1.weight: 2 of shape [64] there, 3 of shape [64] here" in message
    assert readable_bytes(found["best"]["peak_bytes"]) in autopar("estimate", str(path), "-c", "4xh100", *sizes).stdout
    path.write_text(path.read_text().replace('"model": "gpt2"', '"model": "Own"'))
    assert "is of Own, which is no preset and no factory" in refused("estimate", str(path), "-c", "4xh100")


def test_a_run_that_does_not_fit_has_neither_days_nor_money() -> None:
    pytest.importorskip("transformers")
    asked = ("estimate", "llama3-8b", "-c", "1xrtx4090", "--layers", "8", "--seq-len", "64", "--micro-batch", "1")
    shown = autopar(*asked, "--tokens", "1e9")
    assert "does not fit with 90%" in shown.stdout
    assert "whole run" not in shown.stdout and "days" not in shown.stdout
    data = json_of(*asked, "--tokens", "1e9")
    assert not data["fits"] and data["run"] is None and data["peak_bytes"] > 0.92 * data["device_bytes"]


def test_a_framework_is_a_word_for_its_engine() -> None:
    for word, engine in (("torchtitan", "fsdp"), ("deepspeed", "deepspeed"), ("accelerate", "accelerate")):
        assert json_of("estimate", "gpt2", "-c", "4xh100", "--engine", word, *SMALL)["engine"] == engine


@pytest.mark.parametrize(("text", "number"), [("300B", 3e11), ("1.5t", 1.5e12), ("15e12", 1.5e13), ("2K", 2e3)])
def test_tokens_may_have_a_suffix(text: str, number: float) -> None:
    assert big_number(text) == number


def test_everything_wrong_at_once() -> None:
    assert "'12Q' is no number such as 15e12, 300B" in refused("estimate", "gpt2", "-c", "4xcpu", "--tokens", "12Q")
    message = refused("estimate", "gpt2", "-c", "4xcpu", "--tp", "3", "--dp", "3", "--zero", "7", "--seq-len", "0")
    assert "--zero: must be 0, 1, 2 or 3" in message and "--seq-len: must be a whole number" in message
    message = refused("estimate", "gpt2", "-c", "4xcpu", "--tp", "3", "--pp", "3")
    assert "tp: must divide the 4 ranks" in message and "pp: must divide the 4 ranks" in message
    message = refused("estimate", "gpt2", "-c", "4xcpu", "--tokens", "-1", "--precision", "fp4")
    assert "--tokens: must be a number greater than 0" in message and "--precision: must be one of" in message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("lama3-8b", "-c", "8xh100"), "did you mean 'llama3-8b'?"),
        (("gpt2", "-c", "8xh10"), "unknown device 'h10'"),
        (("gpt2", "-c", "8xh100", "--engine", "megatronn"), "did you mean 'megatron'?"),
        (("gpt2", "-c", "8xh100", "--cp", "3"), "cp: must divide the 8 ranks"),
        (("gpt2", "-c", "8xh100", "--ep", "0"), "ep: must be at least 1"),
        (("gpt2", "-c", "8xa100-80gb", "--precision", "fp8"), "has no unit for fp8; use"),
        (("gpt2", "-c", "8xh100", "--profile", "none.yaml"), "profile file 'none.yaml' cannot be used"),
        (("gpt2", "-c", "8xh100", "--grams-co2-per-kwh", "300"), "add --tokens"),
        (("gpt2", "-c", "8xh100", "--correct", "out.yaml"), "add --trace FILE"),
        (("gpt2", "-c", "8xh100", "--trace", "t.json", "--correct", "none/out.yaml"), "--correct: cannot be written"),
        (("gpt2", "-c", "8xh100", "--trace", "t.json", "--engine", "fsdp"), "leave out --engine"),
        (("gpt2", "-c", "8xh100", "--trace", "none.json"), "trace 'none.json' cannot be used"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_refusals(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused("estimate", *arguments)


def test_measured_steps_correct_the_profile(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    names = (
        "id,layers,hidden,ffn_hidden,n_heads,n_kv_heads,vocab,gated_mlp,seq_len,gpu_type,num_gpus,tp,pp,micro_batch,"
        "global_batch,precision,framework,step_time_s"
    )
    (tmp_path / "old.csv").write_text(
        f"{names}\nmine,2,4096,14336,32,8,128256,true,4096,H100,8,1,1,1,8,BF16 mixed,autopar,9\n"
    )
    asked = ("estimate", "llama3-8b", "-c", "8xh100", *SMALL, "--zero", "3")
    advice = refused(*asked, "--measured", str(tmp_path / "old.csv")).partition("(python ")[2].partition(")")[0]
    old, new = str(tmp_path / "old.csv"), str(tmp_path / "runs.csv")
    command = advice.replace("RUNS.csv", old).replace("NEW.csv", new).split()
    subprocess.run([sys.executable, *command], check=True, cwd=Path(__file__).parents[2])
    plain, measured = json_of(*asked), json_of(*asked, "--measured", str(tmp_path / "runs.csv"))
    assert measured["step_s"] > 1.5 * plain["step_s"]
    assert any("mine +" in one for one in measured["assumptions"])
    assert "no measured step" in refused(*asked, "--engine", "fsdp", "--measured", str(tmp_path / "runs.csv"))
