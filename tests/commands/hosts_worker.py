"""One process of a job: hosts_worker.py CLUSTER [calibrate | FAULT]. Prints the result of `autopar.tune`."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.commands import tune_candidates


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"loss": x.pow(2).mean()}


def plant(fault: str) -> None:
    """Let the first trial fail on rank 1."""
    sys.path.insert(0, str(Path(__file__).parent / "planted"))
    usual, count = tune_candidates.Subject.job, [0]

    def job(self: Any, *given: Any) -> Any:
        count[0] += 1
        return replace(usual(self, *given), origin=f"planted_{fault}" if count[0] == 1 else "")

    tune_candidates.Subject.job = job  # type: ignore[method-assign]


def main() -> None:
    asked = sys.argv[2] if len(sys.argv) > 2 else ""
    if asked == "calibrate":
        tune_candidates.CALIBRATION_MINUTES = 0.1
    elif asked:
        plant(asked)
    found = autopar.tune(
        Model(), sys.argv[1], example_inputs={"x": torch.zeros(4, 32)}, global_batch=8, trials=2, trial_s=60.0,
        calibrate=asked == "calibrate",
    )  # fmt: skip
    data = found.to_dict()
    print(json.dumps({name: data[name] for name in ("step_s", "tried", "why", "notes")}))


if __name__ == "__main__":
    main()
