"""A stage that raises, is killed or hangs ends every rank soon, and is named."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
from test_faults import is_running

from autopar.errors import RankError
from autopar.ir.plan import Degrees
from autopar.runtime.launch import Ranks
from autopar.verification import rank_name

WISH = {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 2}
DESCRIBE = partial(rank_name, Degrees(pp=2, dp_shard=2, micro_batches=2))
TIMEOUT_S = 30.0  # a world must be up within it, on a busy machine too
GRACE_S = 10.0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "fault, says",
    (
        (
            "raise",
            ("ValueError: a planted fault", "in pipeline stage 1, forward pass of micro-batch 1", "pipeline_ranks.py"),
        ),
        ("kill", ("the process ended with exit code -9",)),
        ("sleep", ("did not answer within 30 s", "in fail")),
        ("stop", ("did not answer within 30 s",)),
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
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    assert len(pids) == 4 and not any(is_running(pid) for pid in pids if pid != os.getpid())
