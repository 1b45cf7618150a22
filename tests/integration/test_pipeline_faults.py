"""A stage that raises, is killed or hangs ends every rank soon, and is named."""

import os
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torchrun
from suites import long
from test_faults import is_running

from autopar.commands.verify import rank_name
from autopar.errors import RankError
from autopar.ir.degrees import Degrees
from autopar.runtime.distributed.launch import Ranks

WISH = {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 2}
DESCRIBE = partial(rank_name, Degrees(pp=2, dp_shard=2, micro_batches=2))
TIMEOUT_S = 10.0
TORCHRUN_TIMEOUT_S = 30.0  # its ranks import torch, one sooner than another
GRACE_S = 10.0
WAITS = re.compile(
    r"rank [012]: in pipeline stage [01], \w+ pass of micro-batch [01].*, (waiting for stage|in \S+ (of|over)) "
)


@pytest.mark.parametrize(
    "fault, says",
    (
        (
            "raise",
            ("ValueError: a planted fault", "in pipeline stage 1, forward pass of micro-batch 1", "pipeline_ranks.py"),
        ),
        long("kill", ("the process ended with exit code -9",)),
        (
            "sleep",
            ("did not answer within 10 s", "rank 3: in pipeline stage 1, forward pass of micro-batch 1, ", "in fail"),
        ),
        long("stop", ("did not answer within 10 s",)),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_first_cause_and_stage_are_named(fault: str, says: tuple[str, ...], tmp_path: Path) -> None:
    arguments = (4, WISH, 3, fault, str(tmp_path))
    with Ranks(4, timeout_s=TIMEOUT_S) as ranks:
        with pytest.raises(RankError) as caught:
            ranks.run("pipeline_ranks:faulty_step", *arguments, describe=DESCRIBE)
        assert time.time() - float((tmp_path / "when").read_text()) < TIMEOUT_S + GRACE_S
    text = str(caught.value)
    assert text.startswith("rank 3 (pipeline stage 1) ") and caught.value.rank == 3, text
    assert all(part in text for part in says), text
    assert WAITS.search(text) or "did not answer" not in text, text
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    assert len(pids) == 4 and not any(is_running(pid) for pid in pids if pid != os.getpid())


@pytest.mark.long
def test_under_torchrun_waiting_ranks_name_whom_they_wait_for(tmp_path: Path) -> None:
    """Rank 3, of stage 1, sleeps: its peer of stage 1 is in a collective with it, stage 0 waits for messages."""
    code, output = torchrun.run(4, "torchrun_hang.py", tmp_path, TORCHRUN_TIMEOUT_S)
    assert code != 0 and (tmp_path / "when").exists(), output[-4000:]
    hung_at = float((tmp_path / "when").read_text())
    expected = {
        0: r"rank 0: in pipeline stage 0, backward pass of micro-batch 1, waiting for stage 1 on rank 2$",
        1: r"rank 1: in pipeline stage 0, backward pass of micro-batch 1, waiting for stage 1 on rank 3$",
        2: r"rank 2: in pipeline stage 1, forward pass of micro-batch 1, block '[\w.]+', "
        r"in (all-\w+|reduce-scatter) of '\w+' over tp \(ranks 2, 3\)$",
    }
    for rank, wanted in expected.items():
        when, _, text = (tmp_path / f"error-{rank}").read_text().partition("\n")
        assert float(when) - hung_at < TORCHRUN_TIMEOUT_S + GRACE_S, text
        assert re.search(wanted, text, re.MULTILINE) and "in forward_backward" in text, text
    assert "rank 2: in pipeline stage 1" in output
