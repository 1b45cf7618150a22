"""The model of a training script: what it gives to `autopar.parallelize`, and scripts that never come so far."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.commands.given import given_by_script
from autopar.errors import InputError

SCRIPT = """
import argparse
import {imports}
import torch
from beside import Model

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    width = parser.parse_args().width
    try:
        batch = (torch.zeros(4, width),) * 2
        parallel = {call}(Model(width), "2xcpu", example_inputs=batch, loss_fn=mean, plan="tuned")
    except Exception:
        raise SystemExit("it was caught")
    finally:
        {finally_}
    raise AssertionError("it went on")

def mean(output, target):
    return (output - target).pow(2).mean()

if __name__ == "__main__":
    main()
"""
BESIDE = """
from torch import nn

class Model(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
"""


def script(folder: Path, imports: str = "autopar", call: str = "autopar.parallelize", finally_: str = "pass") -> str:
    (folder / "beside.py").write_text(BESIDE)
    (folder / "train.py").write_text(SCRIPT.format(imports=imports, call=call, finally_=finally_))
    return str(folder / "train.py")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "beside", raising=False)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"imports": "autopar.api as a", "call": "a.parallelize"},
        {"finally_": "torch.distributed.destroy_process_group()"},
    ],
    ids=["usual", "by another name", "a clean-up that fails"],
)
def test_the_arguments_of_the_call_are_taken(how: dict[str, str], tmp_path: Path) -> None:
    before, arguments = autopar.parallelize, list(sys.argv)
    found = given_by_script(f"{script(tmp_path, **how)} --width 8")
    asked = found.request
    assert isinstance(asked.model, nn.Linear) and asked.model.in_features == 8 and found.name == "Model"
    assert isinstance(asked.inputs, tuple) and asked.inputs[0].shape == (4, 8)
    assert asked.loss_fn is not None and float(asked.loss_fn(torch.ones(2), torch.zeros(2))) == 1
    assert autopar.parallelize is before and sys.argv == arguments and str(tmp_path) not in sys.path


def test_scripts_that_give_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"raised SystemExit: 2 \(.*\) before it called autopar.parallelize.*--size 2"):
        given_by_script(script(tmp_path))
    (tmp_path / "fails.py").write_text("import torch\ntorch.zeros(2) @ torch.zeros(3)\n")
    with pytest.raises(InputError, match=r"fails.py raised RuntimeError: .*fails.py:2"):
        given_by_script(str(tmp_path / "fails.py"))
    (tmp_path / "ends.py").write_text("x = 1\n")
    with pytest.raises(InputError, match="ended without a call of autopar"):
        given_by_script(str(tmp_path / "ends.py"))
    with pytest.raises(InputError, match="there is no script"):
        given_by_script(str(tmp_path / "no.py"))


@pytest.mark.parametrize("named", ['precision="bf16"', 'plan={"tp": 2, "precision": "bf16"}'])
def test_the_precision_of_a_script_is_taken(named: str, tmp_path: Path) -> None:
    call = f"autopar.parallelize(torch.nn.Linear(2, 2), '2xcpu', example_inputs=(torch.zeros(4, 2),), {named})"
    (tmp_path / "precise.py").write_text(f"import autopar, torch\n{call}\n")
    assert given_by_script(str(tmp_path / "precise.py")).precision == "bf16"
