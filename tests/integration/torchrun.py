"""Start a script beside this file under torchrun, without a fixed port."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def start(world_size: int | None, script: str, *arguments: object) -> subprocess.Popen[str]:
    """The running launcher; without a world size, the script by itself."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    command = [sys.executable]
    if world_size is not None:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    return subprocess.Popen(
        [*command, str(HERE / script), *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(world_size: int | None, script: str, *arguments: object, timeout_s: float) -> tuple[int, str]:
    """Exit status and output."""
    process = start(world_size, script, *arguments)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode, output
