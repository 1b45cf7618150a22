"""`autopar coverage`: its table and its JSON."""

from pathlib import Path

import pytest
from run import autopar, json_of, refused

pytest.importorskip("transformers")
SMALL = ("--layers", "2", "--hidden", "64", "--seq-len", "32")


def test_a_model_whose_products_all_split() -> None:
    shown = autopar("coverage", "llama3-8b", "--tp", "4", *SMALL)
    assert shown.exit_code == 0, shown.stderr
    assert "llama3-8b on tp 4 of 4xh100" in shown.stdout
    assert "tp splits 100.0% of FLOP" in shown.stdout
    linear = next(line for line in shown.stdout.splitlines() if line.startswith("linear"))
    assert linear.split()[1] == "15" and linear.endswith("100.0%")


def test_json() -> None:
    found = json_of("coverage", "gpt2", "--tp", "2", "--dp", "2", "--cluster", "4xcpu", *SMALL)
    assert (found["model"], found["cluster"], found["mesh"]) == ("gpt2", "4xcpu", {"dp": 2, "tp": 2})
    assert found["split"]["tp"]["flops"] == found["split"]["dp"]["flops"] == 1.0
    names = {operator["operator"] for operator in found["operators"]}
    assert {"scaled_dot_product_attention", "layer_norm", "embedding"} <= names


def test_an_operator_without_a_rule_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    shown = autopar("coverage", "cli_models:plain", "--tp", "2").stdout
    row = next(line for line in shown.splitlines() if "bessel_j0" in line and "tp" in line.split()[0])
    assert row.split()[-5] == "no"
    assert row.split()[-1] in ("bytes", "kB")


def test_degrees_that_do_not_fit_the_cluster() -> None:
    assert "must divide the 4 ranks" in refused("coverage", "gpt2", "--tp", "3", "--cluster", "4xcpu", *SMALL)
