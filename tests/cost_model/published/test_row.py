"""Reading published runs: the shipped collection as it is, and files with faults as one list."""

import contextlib
import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from work import lines_run

from autopar.cost_model.published.measurement import (
    BYTES_PER_GB,
    hardware_flops,
    measured_bytes,
    measured_seconds,
    model_flops,
)
from autopar.cost_model.published.row import (
    COLUMNS,
    CONVERT,
    MAX_FILE_BYTES,
    MAY_LACK,
    NEEDED,
    RESULT_COLUMNS,
    TEXTS,
    Row,
    read_row_file,
    read_rows,
)
from autopar.errors import InputError

DATA = Path(__file__).resolve().parents[3] / "benchmarks" / "data"
RUNS = DATA / "published_runs.csv"
SWEEP = DATA / "sweep_vtrain_single_a100.csv"
CELLS = ["a", "2", "64", "256", "4", "512", "128", "A100-80", "8", "1", "1", "2", "16", "bf16"]
GOOD = dict(zip(NEEDED, CELLS, strict=True))


def write(path: Path, *lines: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path


def problems_of(path: Path) -> list[str]:
    with pytest.raises(InputError) as raised:
        read_rows(path)
    assert raised.value.problems, raised.value
    return [str(problem) for problem in raised.value.problems]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_rows(RUNS)


def test_shipped_collection(rows: list[Row]) -> None:
    assert len(rows) == 878
    assert sum(row.tier == "core" for row in rows) == 343
    assert sum(row.outcome == "oom" for row in rows) == 12
    assert sum(row.not_stated() != () for row in rows) == 11
    first = rows[0]
    assert (first.id, first.layers, first.sp, first.moe_experts) == ("megatron_sc21_t1_001", 24, False, None)
    assert (first.gpu_mem_gb, first.step_time_s, first.step_time_derived_s) == (80.0, None, 3.528)
    with RUNS.open(newline="") as file:
        header = next(csv.reader(file))
    assert header == [name for name in COLUMNS if name in header]


def test_does_not_import_torch() -> None:
    program = "import sys\nfrom autopar.cost_model.published import validation\nassert 'torch' not in sys.modules\n"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_result_is_taken_away(rows: list[Row]) -> None:
    assert RESULT_COLUMNS[0] == "outcome" and RESULT_COLUMNS[-1] == "notes"
    for row in rows[:50]:
        bare = row.without_result()
        assert all(getattr(bare, name) is None for name in RESULT_COLUMNS)
        assert replace(bare, **{name: getattr(row, name) for name in RESULT_COLUMNS}) == row


def test_only_needed_columns(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path / "runs.csv", GOOD))
    values: list[Any] = ["a", 2, 64, 256, 4, 512, 128, "A100-80", 8, 1, 1, 2, 16, "bf16"]
    assert row == Row(**dict(zip(NEEDED, values, strict=True)))
    assert row.not_stated() == ()


@pytest.mark.parametrize(
    ("column", "cell", "value"),
    [
        ("num_gpus", "512.0", 512),
        ("n_params", "1.7e9", 1_700_000_000),
        ("zero", "0", 0),
        ("sp", "True", True),
        ("sp", "false", False),
        ("global_batch", "", None),
        ("moe_shared_ffn", "0", 0),
        ("step_time_s", "1e-2", 0.01),
        ("notes", 'a, "quoted"\nline', 'a, "quoted"\nline'),
    ],
)
def test_cells(tmp_path: Path, column: str, cell: str, value: object) -> None:
    (row,) = read_rows(write(tmp_path / "runs.csv", GOOD | {column: cell}))
    assert getattr(row, column) == value
    assert type(getattr(row, column)) is type(value)


@pytest.mark.parametrize(
    ("column", "cell", "says"),
    [
        ("num_gpus", "0", "at least 1"),
        ("num_gpus", "-4", "at least 1"),
        ("num_gpus", "1.5", "whole number"),
        ("num_gpus", "true", "whole number"),
        ("num_gpus", "8 GPUs", "whole number"),
        ("num_gpus", "1_000", "whole number"),
        ("num_gpus", "1e30", "at most"),
        ("num_gpus", "9" * 5000, "whole number"),
        ("zero", "4", "at most 3"),
        ("sp", "1", "true or false"),
        ("step_time_s", "nan", "above 0"),
        ("step_time_s", "inf", "above 0"),
        ("step_time_s", "-1", "above 0"),
        ("step_time_s", "3 s", "bare number"),
        ("peak_mem_gb", "0", "above 0"),
        ("outcome", "OOM", "ok, oom"),
        ("recompute", "partly", "none, selective, full"),
        ("precision", "bfloat16", "bf16, fp16"),
        ("engine", "torchtitan", "fsdp, "),
        ("family", "Llama", "llama, "),
        ("loss", "fast", "fused, eager"),
        ("recompute_modules", "attention", "core_attn, layernorm"),
        ("model", "x\x1b[31m", "control characters"),
        ("notes", "x" * 5000, "at most 4,000 characters"),
    ],
)
def test_bad_cell(tmp_path: Path, column: str, cell: str, says: str) -> None:
    (problem,) = problems_of(write(tmp_path / "runs.csv", GOOD | {column: cell}))
    assert problem.startswith(f"a, {column}: ") and says in problem
    assert len(problem) < 300


def test_all_problems_at_once(tmp_path: Path) -> None:
    lines = [GOOD | {"sp": "no"}, GOOD | {"id": "b", "tp": "x", "sp": "yes"}, GOOD | {"id": ""}, GOOD | {"sp": ""}]
    path = write(tmp_path / "runs.csv", *[{**GOOD, "sp": ""} | line for line in lines])
    found = problems_of(path)
    assert [problem.partition(": ")[0] for problem in found] == ["a, sp", "b, tp", "b, sp", "line 4, id", "a"]
    assert "lines 2 and 5" in found[-1]


def test_columns(tmp_path: Path) -> None:
    columns = {name: cell for name, cell in GOOD.items() if name not in ("hidden", "precision")}
    found = problems_of(write(tmp_path / "runs.csv", columns | {"hiden": "64", "qqqqq": "1"}))
    assert "did you mean 'hidden'?" in found[0]
    assert "'qqqqq': is not a known column (valid: " in found[1]
    assert [problem.partition(":")[0] for problem in found[2:]] == ["hidden", "precision"]


def test_rows_that_cannot_be_used_are_left_out(tmp_path: Path) -> None:
    good = GOOD | {"sp": ""}
    lines = [good, good | {"id": "b", "tp": "x", "sp": "yes"}, good | {"id": ""}, good, good | {"id": "\x07"}]
    path = write(tmp_path / "runs.csv", *lines)
    path.write_text(path.read_text() + "c,1,2\n")
    found = read_row_file(path)
    assert [row.id for row in found.rows] == ["a", "line 4"]
    assert [one.id for one in found.left_out] == ["b", "a", "line 6", "line 7"]
    reasons = [one.reason for one in found.left_out]
    assert reasons[0].startswith("tp: must be a whole number")
    assert "; sp: must be true or false, or empty; got 'yes'" in reasons[0]
    assert reasons[1] == "lines 2 and 5 have the same id"
    assert reasons[2] == "id: must be text without control characters; got '\\x07'"
    assert reasons[3].startswith("must have 15 cells")
    with pytest.raises(InputError):
        read_row_file(path, is_strict=True)


def test_a_file_without_any_usable_row_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", GOOD | {"tp": "x"}, GOOD | {"id": "b", "tp": "y"})
    with pytest.raises(InputError, match="cannot be used") as error:
        read_row_file(path)
    assert [problem.path for problem in error.value.problems] == ["a, tp", "b, tp"]


def test_unknown_columns_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", {"my notes": "x\x1b"} | GOOD | {"hiden": "64"})
    found = read_row_file(path)
    assert found.unknown_columns == ("my notes", "hiden")
    assert found.left_out == ()
    assert found.rows == tuple(read_rows(write(tmp_path / "same.csv", GOOD)))


def test_ids_and_batches_may_lack(tmp_path: Path) -> None:
    cells = {name: cell for name, cell in GOOD.items() if name not in MAY_LACK}
    (row,) = read_row_file(write(tmp_path / "runs.csv", cells)).rows
    assert (row.id, row.micro_batch, row.global_batch) == ("line 2", None, None)
    del cells["hidden"]
    with pytest.raises(InputError, match="hidden: is a needed column, and missing") as error:
        read_row_file(write(tmp_path / "runs.csv", cells | {"hiden": "64"}))
    assert "did you mean 'hidden'?" in str(error.value)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_names_the_command_that_converts_it(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", GOOD | {name: "Megatron-LM 2021"})
    with pytest.raises(InputError, match=rf"{name}: is text that is not read.*{CONVERT}"):
        read_row_file(path)
    assert read_rows(write(path, GOOD | {name: "Megatron-LM 2021", "engine": "megatron"}))[0].engine == "megatron"


@pytest.mark.parametrize(("name", "text"), [("precision", "BF16 mixed"), ("tflops_kind", "model, causal")])
def test_a_text_where_a_word_belongs_names_the_command_too(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"a, {name}: must be one of .*{CONVERT}"):
        read_row_file(write(tmp_path / "runs.csv", GOOD | {name: text}))


def test_repeated_column(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(",".join([*GOOD, "tp"]) + "\n")
    assert problems_of(path) == ["tp: is a column 2 times (keep one)"]


def test_wrong_number_of_cells(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", GOOD)
    path.write_text(path.read_text() + "b,1,2\n")
    (problem,) = problems_of(path)
    assert problem.startswith("line 3: must have 14 cells")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"\xff\xfe\x00id", "UTF-8"),
        (b"id,\x00layers", "NUL"),
        (b'id,layers\n"a,1', "not valid CSV"),
        (b"id," + b"x" * 200_000, "not valid CSV"),
        (b"x" * (MAX_FILE_BYTES + 1), "at most"),
    ],
    ids=["empty", "blank", "utf-16", "nul", "open quote", "long cell", "too big"],
)
def test_hostile_files(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_rows(path)
    assert lines_run(lambda: refused(path)) < 200  # whatever their size


def refused(path: Path) -> None:
    with contextlib.suppress(InputError):
        read_rows(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_rows(tmp_path / "runs.csv")
    with pytest.raises(InputError, match="regular file"):
        read_rows(tmp_path)


def test_sweep_says_what_its_sample_says(rows: list[Row]) -> None:
    """The collection holds 60 of the sweep's runs, written by hand with all columns."""
    sweep = {row.id.rpartition("_")[2]: row for row in read_rows(SWEEP)}
    sample = [row for row in rows if row.source_key == "vtrain_single"]
    assert len(sample) == 60
    for row in sample:
        line = (row.notes or "").partition(";")[0].removeprefix("CSV line ")
        same = replace(sweep[line], id=row.id, tier=row.tier, notes=row.notes)
        assert same == row


# --- what was measured ---------------------------------------------------------------------------------------------


def test_stated_time_comes_first() -> None:
    row = Row(id="a", step_time_s=2.0, step_time_derived_s=3.0)
    found = measured_seconds(row)
    assert found is not None and (found.seconds, found.derivation) == (2.0, "stated")
    derived = measured_seconds(replace(row, step_time_s=None, step_time_derivation="from tokens"))
    assert derived is not None and (derived.seconds, derived.derivation) == (3.0, "from tokens")
    assert measured_seconds(replace(row, outcome="oom")) is None


def test_time_from_throughput() -> None:
    row = Row(id="a", global_batch=64, seq_len=1000, num_gpus=8, tokens_per_s_per_gpu=4000)
    found = measured_seconds(row)
    assert found is not None and found.seconds == pytest.approx(2.0)
    found = measured_seconds(replace(row, tokens_per_s_per_gpu=None, samples_per_s=16))
    assert found is not None and found.seconds == pytest.approx(4.0)
    without_batch = replace(row, global_batch=None)
    assert measured_seconds(without_batch) is None
    assumed = measured_seconds(without_batch, global_batch=128)
    assert assumed is not None and assumed.seconds == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("source", "within"),
    [("megatron_sc21_t1", 0.001), ("megatron_sc21_t2", 0.001), ("bigscience_tr11", 0.17), ("mosaic_llmfoundry", 0.04)],
)
def test_time_from_flops_is_the_stated_one(rows: list[Row], source: str, within: float) -> None:
    """Rows that state both TFLOP/s and a time; single ones of bigscience_tr11 contradict themselves."""
    errors = []
    for row in rows:
        time_ = measured_seconds(row)
        if row.source_key == source and row.tflops_per_gpu is not None and time_ is not None:
            bare = replace(row, step_time_s=None, step_time_derived_s=None, tokens_per_s_per_gpu=None)
            found = measured_seconds(replace(bare, samples_per_s=None))
            assert found is not None and "FLOP" in found.derivation
            errors.append(abs(found.seconds / time_.seconds - 1))
    assert len(errors) >= 10
    assert max(errors) < within
    assert sorted(errors)[len(errors) // 2] < 0.005


def test_unstated_convention_gives_no_time(rows: list[Row]) -> None:
    (row,) = [row for row in rows if row.source_key == "gpt_neox_20b"]
    assert row.tflops_per_gpu is not None
    assert measured_seconds(row) is None


def test_flops_are_the_published_formulas() -> None:
    n, h, a, s, v, b = 24, 2304, 24, 2048, 51200, 512
    row = Row(id="a", layers=n, hidden=h, ffn_hidden=4 * h, n_heads=a, vocab=v, seq_len=s, recompute="full")
    base = b * s * n * h**2
    assert model_flops(row, b) == pytest.approx(72 * base * (1 + s / (6 * h) + v / (12 * n * h)))
    assert hardware_flops(row, b) == pytest.approx(96 * base * (1 + s / (6 * h) + v / (16 * n * h)))
    assert hardware_flops(replace(row, recompute="none"), b) == model_flops(row, b)
    assert hardware_flops(replace(row, recompute=None), b) is None
    assert model_flops(replace(row, attention_type="mla"), b) is None


def test_experts_count_as_often_as_they_are_met() -> None:
    dense = Row(id="a", layers=4, hidden=64, ffn_hidden=256, n_heads=4, vocab=512, seq_len=128)
    sparse = replace(dense, moe_experts=8, moe_topk=2, moe_ffn_hidden=128, moe_shared_ffn=0, moe_layers=4)
    assert model_flops(sparse, 8) == model_flops(dense, 8)
    half = replace(sparse, moe_layers=2, ffn_hidden=256)
    assert model_flops(half, 8) == model_flops(dense, 8)


def test_memory() -> None:
    row = Row(id="a", peak_mem_gb=10.0)
    assert measured_bytes(row) == 10 * BYTES_PER_GB
    assert measured_bytes(replace(row, outcome="oom")) is None
    assert measured_bytes(replace(row, peak_mem_gb=None)) is None
