"""Start a script beside this file under torchrun, without a fixed port."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
HANG_S = 600.0


def start(world_size: int, script: str, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """The running launcher of a script whose first argument is a folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[2]), str(HERE)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    logs = ["--log-dir", str(folder / "logs")]  # torchrun leaves the folder that it makes by itself
    return subprocess.Popen(
        [*command, *logs, str(HERE / script), str(folder), *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(world_size: int, script: str, folder: Path, *arguments: object, timeout_s: float = HANG_S) -> tuple[int, str]:
    """Exit status and output."""
    process = start(world_size, script, folder, *arguments)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode, output
