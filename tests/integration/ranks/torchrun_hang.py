"""The script of test_pipeline_faults under torchrun: rank 3 of two stages on two ranks each sleeps in its second step.

Every other rank writes the error it gets, and waits until all have theirs before it ends torchrun with it.
"""

import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tiny"))  # torchrun starts this file alone

from data_ranks import LENGTH, made, own_rows
from pipeline_ranks import planted

if __name__ == "__main__":
    folder, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    parallel, _ = made(4, {"pp": 2, "tp": 2, "micro_batches": 2}, 4)
    own, _ = own_rows(parallel, (4,), LENGTH, 0)
    parallel.forward_backward(own)
    if rank == 3:
        parallel.segments[0].register_forward_pre_hook(planted("sleep", folder / "when"))
    try:
        parallel.forward_backward(own)
    except RuntimeError:
        (folder / f"error-{rank}").write_text(f"{time.time()}\n{traceback.format_exc()}")
        deadline = time.monotonic() + 30
        while len(list(folder.glob("error-*"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        raise
