"""The script of test_faults under torchrun: rank 1 raises or is killed in its second step."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from integration_ranks import plant

from autopar.api import parallelize
from autopar.models.example_inputs import example_inputs_for
from autopar.models.load import resolve_model

if __name__ == "__main__":
    folder, fault = Path(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    model = resolve_model("gpt2", layers=2, hidden=64, seq_len=16, batch=2, device="cpu").model
    batch = example_inputs_for(model, 2, 16)
    parallel = parallelize(model, "2xcpu", example_inputs=batch)
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    parallel.forward_backward(batch)
    if dist.get_rank() == 1:
        plant(parallel, fault)
        (folder / "planted").touch()
    parallel.forward_backward(batch)
