"""The number of sequences that run, the padding of short batches, and the comparison of ranks."""

from typing import Any

import pytest
import torch
from tiny_models import gpt2

from autopar.capture.program import capture_program
from autopar.errors import RuntimeInputError
from autopar.ir.program import InputInfo, Program
from autopar.runtime.model.inputs import first_rows, pad_batch, read_batch, sequences_to_run
from autopar.runtime.model.preflight_check import ENDED, EVALUATION, FAILED, READING, STEP, checksum, disagreement

IDS = InputInfo(name="ids", shape=(4, 8), dtype=torch.int64, batch_dim=0, sequence_dim=1)
TABLE = InputInfo(name="table", shape=(3,), dtype=torch.float32, batch_dim=None, sequence_dim=None)


@pytest.fixture(scope="module")
def program() -> Program:
    return capture_program(*gpt2(2))


@pytest.mark.parametrize(
    "counts, options, expected",
    (
        ((4, 4), {}, 4),
        ((4, 1), {"pads": True}, 4),
        ((0, 2), {"pads": True}, 4),
        ((2, 2), {"pads": True, "captures": True}, 4),
        ((2, 2), {"pads": True, "captures": True, "wants_outputs": True}, 2),
        ((3, 2), {"pads": True, "captures": True, "wants_outputs": True}, 4),
        ((2, 2), {"captures": True}, 2),
        ((6, 6), {"pads": True, "captures": True}, 6),
        ((4, 1), {"captures": True}, "drop this batch, or pass the same multiple of 2"),
        ((3, 3), {"captures": True}, "3 sequences"),
        ((2, 2), {}, "drop this batch"),
        ((5, 6), {"pads": True, "captures": True}, "at most 4, or the same multiple of 2"),
        ((8, 8), {"pads": True}, "at most 4, or plan again"),
        ((3, 3), {"pads": True, "per_micro_batch": True}, "every micro-batch has the same weight"),
        ((2, 2), {"pads": True, "captures": True, "per_micro_batch": True}, 2),
        ((0, 0), {"pads": True, "captures": True}, "no sequences on any rank"),
    ),
    ids=str,
)
def test_how_many_sequences_run(counts: tuple[int, ...], options: dict[str, bool], expected: int | str) -> None:
    given = {"pads": False, "captures": False, "wants_outputs": False} | options
    if isinstance(expected, int):
        assert sequences_to_run(counts, 4, 2, **given) == expected
    else:
        with pytest.raises(RuntimeInputError, match=expected):
            sequences_to_run(counts, 4, 2, **given)


def test_padding_is_ignored_targets_and_real_rows(program: Program) -> None:
    _, inputs = gpt2(2)
    batch = read_batch(program, {n: t[:3] for n, t in inputs.items()}, 4, any_shape=False)
    assert batch.problems == () and batch.sequences == 3
    filled = pad_batch(batch, 5, {"labels": -100}, {})
    for name, value in filled.items():
        assert torch.equal(value[:3], inputs[name][:3]) and len(value) == 5
    assert (filled["labels"][3:] == -100).all()
    assert torch.equal(filled["input_ids"][3:], inputs["input_ids"][[0, 0]])


def test_an_empty_batch_is_filled_from_the_one_before(program: Program) -> None:
    _, inputs = gpt2(2)
    empty = read_batch(program, {n: t[:0] for n, t in inputs.items()}, 4, any_shape=False)
    assert empty.problems == () and empty.sequences == 0
    full = read_batch(program, inputs, 4, any_shape=False)
    after = pad_batch(empty, 2, {"labels": -100}, first_rows(full))
    assert torch.equal(after["input_ids"], inputs["input_ids"][[0, 0]]) and (after["labels"] == -100).all()
    first = pad_batch(empty, 2, {"labels": -100}, {})
    assert not first["input_ids"].any()


def test_which_shapes_are_read(program: Program) -> None:
    _, inputs = gpt2(2)
    longer = {n: torch.cat((t, t), 1) for n, t in inputs.items()}
    assert read_batch(program, longer, 4, any_shape=True).problems == ()
    assert len(read_batch(program, longer, 4, any_shape=False).problems) == 2
    uneven = {**inputs, "labels": inputs["labels"][:1]}
    assert "different numbers of sequences" in read_batch(program, uneven, 4, any_shape=True).problems[0]


def test_checksums_depend_on_values_and_order() -> None:
    draw = torch.Generator().manual_seed(0)
    for value in (
        torch.randint(0, 50_000, (8, 512), generator=draw),
        torch.randn(3, 20_000, generator=draw),
        torch.randn(7, 5, generator=draw, dtype=torch.float64),
        torch.randn(6, 6, generator=draw).bfloat16(),
        torch.randint(0, 2, (40,), generator=draw).bool(),
        torch.randn(4, 3, generator=draw, dtype=torch.complex128),
    ):
        own = checksum(value)
        assert own == checksum(value.clone()) == checksum(value.t().contiguous().t() if value.dim() == 2 else value)
        assert own != checksum(value.flip(0))
        changed = value.clone()
        changed.view(-1)[-1] = 1 - changed.view(-1)[-1].to(torch.float64 if not value.dtype.is_complex else value.dtype)
        assert own != checksum(changed)
    assert checksum(torch.empty(0, 4)) == 0


def test_checksums_of_large_tensors_read_a_part() -> None:
    value = torch.rand(8, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    own, row = checksum(value), torch.zeros(value.numel() + 1)
    row[1:] = value.view(-1)
    assert own == checksum(row[1:].view(value.shape))  # wherever it lies in memory
    assert own != checksum(value.flip(0)) and own != checksum(value.flip(-1))
    assert own != checksum(torch.cat((value[:7], value[:1])))


def row(kind: int = STEP, **changes: Any) -> list[int]:
    values = {"training": True, "step": 3, "unfit": 0, "sequences": 2, "scaler": 0}
    values |= {"shape": 7, "ids": 11, "other": 5, "table": 13, **changes}
    return [
        2 * kind + values["training"],
        *(values[n] for n in ("step", "unfit", "sequences", "scaler", "shape", "ids", "other", "table")),
    ]


@pytest.mark.parametrize(
    "rows, parts",
    (
        ([row(), row(), row(ids=9), row(ids=9)], ()),
        ([row(), row(), row(ids=9, sequences=1), row(ids=9, sequences=1)], ()),
        ([row(), row(ids=9), row(), row(ids=9)], ("'ids'", "ranks 1, 3 got other data than ranks 0, 2", "only in tp")),
        ([row(), row(sequences=1), row(), row()], ("'ids'", "rank 1 got other data than rank 0")),
        ([row(), row(), row(), row(table=1)], ("'table'", "rank 3 got other data", "no batch")),
        ([row(), row(), row(shape=8), row(shape=8)], ("'ids'", "ranks 2, 3 got another shape than ranks 0, 1")),
        ([row(), row(step=4), row(), row()], ("ranks 0, 2, 3 at 3", "rank 1 at 4")),
        ([row(), row(training=False), row(), row()], ("ranks 0, 2, 3 in training mode", "rank 1 in eval mode")),
        ([row(), row(EVALUATION), row(), row()], ("ranks 0, 2, 3 in forward_backward", "rank 1 in evaluate")),
        ([row(READING), row(ENDED), row(READING), row(ENDED)], ("ranks 1, 3 ran out of data after 3 batches",)),
        ([row(READING), row(FAILED), row(READING), row(READING)], ("rank 1 failing",)),
        ([row(STEP), row(ENDED), row(STEP), row(STEP)], ("rank 1 at the end of its data", "0, 2, 3 in forward_")),
        ([row(), row(unfit=1), row(), row()], ("the batch of rank 1 does not fit",)),
    ),
)
def test_what_ranks_do_not_agree_on(rows: list[list[int]], parts: tuple[str, ...]) -> None:
    found = disagreement(rows, (IDS, TABLE), lambda rank: rank // 2)
    assert bool(found) == bool(parts)
    assert all(part in found for part in parts), found
