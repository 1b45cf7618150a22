"""Published training runs as values: the columns of ``benchmarks/data/README.md``, read strictly from CSV.

A `Row` is one published training step with its model, machine, layout and result. Every column except `id` may be
empty: None means "not stated". `RESULT_COLUMNS` names the columns of the result. A prediction gets `without_result`, a
row without them. This module does not import torch.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import isfinite
from typing import Any, get_args

from autopar.cost_model.interval import Interval, Situation, interval_of
from autopar.cost_model.machine.engine import Engine, Module, engine_names
from autopar.cost_model.published.adapters import known_targets
from autopar.cost_model.work.block_work import family_names
from autopar.errors import InputError, Problem, did_you_mean
from autopar.files.strict_text import read_text
from autopar.ir.optimizers import OPTIMIZERS
from autopar.ir.precision import REDUCE_DTYPES
from autopar.ir.trained import trained_from

MAX_FILE_BYTES = 32 * 1024 * 1024
_MAX_ROWS = 100_000
MAX_CELL_CHARS = 4_000
MAX_NUMBER = 1e16
# Without these columns no row can be modelled; in a row, each but `id` may still be empty.
NEEDED = (
    *("id", "layers", "hidden", "ffn_hidden", "n_heads", "vocab", "seq_len", "gpu_type", "num_gpus"),
    *("tp", "pp", "micro_batch", "global_batch", "precision"),
)
MAY_LACK = ("id", "micro_batch", "global_batch")  # a row is named by its line, and batches are assumed
ROW_PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "mxfp4", "fp32")
# mechanisms of the engine that a row states, by the name of the field
ENGINE_COLUMNS = (
    *("attention", "attention_kernel", "pointwise", "dispatch", "tensor_overlap", "loss", "offload", "gradients"),
)
TEXTS = ("framework", "attn_impl", "zero_detail", "optimizer", "inter_link")  # as sources write, and not read
CONVERT = "python tools/published_columns.py RUNS.csv --out NEW.csv"
_WORDS: Mapping[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"),
    "outcome": ("ok", "oom"),
    "tflops_kind": ("model", "hardware"),
    "precision": ROW_PRECISIONS,
    "family": family_names(),
    "engine": engine_names(),
    "engine_basis": ("stated", "guessed"),
    "stored": REDUCE_DTYPES,
    "memory_basis": ("device", "allocated"),
    "head": ("vocabulary", "small"),
    "optimizer_state": tuple(OPTIMIZERS),
    **{name: get_args(Engine.model_fields[name].annotation) for name in ENGINE_COLUMNS},
}
_FROM_ZERO = ("moe_shared_ffn", "moe_layers", "zero")
_MODULES = get_args(Module)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published training step; the fields are the columns, with their units, in their order."""

    id: str
    source_key: str | None = None
    source: str | None = None
    tier: str | None = None
    group: str | None = None
    model: str | None = None
    family: str | None = None
    n_params: int | None = None
    layers: int | None = None
    hidden: int | None = None
    ffn_hidden: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    tied_embeddings: bool | None = None
    gated_mlp: bool | None = None
    head: str | None = None
    attention_type: str | None = None
    moe_experts: int | None = None
    moe_topk: int | None = None
    moe_ffn_hidden: int | None = None
    moe_shared_ffn: int | None = None
    moe_layers: int | None = None
    seq_len: int | None = None
    gpu_type: str | None = None
    gpu_mem_gb: float | None = None
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    intra_link: str | None = None
    inter_link: str | None = None
    inter_gb_per_s: float | None = None
    tp: int | None = None
    sp: bool | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    zero: int | None = None
    zero_detail: str | None = None
    shard_ranks: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    grad_accum: int | None = None
    recompute: str | None = None
    recompute_modules: tuple[Module, ...] | None = None
    recompute_basis: str | None = None
    precision: str | None = None
    trains: str | None = None
    stored: str | None = None
    optimizer_state: str | None = None
    optimizer: str | None = None
    attn_impl: str | None = None
    framework: str | None = None
    engine: str | None = None
    engine_basis: str | None = None
    attention: str | None = None
    attention_kernel: str | None = None
    pointwise: str | None = None
    dispatch: str | None = None
    tensor_overlap: str | None = None
    loss: str | None = None
    offload: str | None = None
    gradients: str | None = None
    memory_basis: str | None = None
    outcome: str | None = None
    step_time_s: float | None = None
    tflops_per_gpu: float | None = None
    tflops_kind: str | None = None
    tflops_attention: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None
    peak_mem_gb: float | None = None
    mem_kind: str | None = None
    step_time_derived_s: float | None = None
    step_time_derivation: str | None = None
    provenance: str | None = None
    notes: str | None = None

    def without_result(self) -> Row:
        """The same run with every column of `RESULT_COLUMNS` empty."""
        nothing: dict[str, Any] = dict.fromkeys(RESULT_COLUMNS)
        return replace(self, **nothing)

    def not_stated(self) -> tuple[str, ...]:
        """The columns of `NEEDED` that are empty: a row states enough to be modelled where there are none."""
        return tuple(name for name in NEEDED if getattr(self, name) is None)


COLUMNS = tuple(each.name for each in fields(Row))
RESULT_COLUMNS = COLUMNS[COLUMNS.index("outcome") :]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEstimate:
    """The prediction for one row."""

    id: str
    seconds: float  # of one optimizer step
    peak_bytes: float  # of the fullest rank
    fits: bool | None  # None if the device's memory is not known
    parts: Mapping[str, float]  # seconds by name that add up to the step
    global_batch: int | None = None  # the assumed sequences of a step, for a row that does not state them
    warnings: tuple[str, ...] = ()  # which texts of the row were not used, or not clear
    situation: Situation = field(default_factory=Situation)  # decides how wide the intervals are

    @property
    def interval_s(self) -> Interval:
        """The interval of the seconds."""
        return interval_of(self.seconds, "time", self.situation)

    @property
    def interval_bytes(self) -> Interval:
        """The interval of the peak memory."""
        return interval_of(self.peak_bytes, "memory", self.situation)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoEstimate:
    """A row without a prediction, and the reason."""

    id: str
    reason: str


Estimator = Callable[[Sequence[Row]], Sequence[RowEstimate | NoEstimate]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRow:
    """A row that cannot be used. `id` is ``line 7`` if the row has none; the path of a problem is its column."""

    id: str
    problems: tuple[Problem, ...]

    @property
    def reason(self) -> str:
        """All problems in one sentence."""
        return "; ".join(str(problem) for problem in self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """The usable rows of a file, the rows left out, and the columns that nothing reads."""

    rows: tuple[Row, ...]
    left_out: tuple[RejectedRow, ...] = ()
    unknown_columns: tuple[str, ...] = ()


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a CSV file whose header names columns of `Row`."""
    return list(read_row_file(path, is_strict=True).rows)


def read_row_file(path: str | os.PathLike[str], *, is_strict: bool = False) -> RowFile:
    """Read the usable rows of a CSV file."""
    header, lines = _table(path)
    _check_header(path, header, is_strict=is_strict)
    unknown = tuple(dict.fromkeys(name for name in header if name not in _PARSERS))
    read = [(place, name, _PARSERS[name]) for place, name in enumerate(header) if name in _PARSERS]
    at = header.index("id") if "id" in header else None
    left_out: list[RejectedRow] = []
    seen: dict[str, int] = {}
    rows: list[Row] = []
    for number, cells in lines:
        row_id, problems = f"line {number}", []
        values: dict[str, object] = {}
        if len(cells) != len(header):
            rule = f"must have {len(header)} cells, as the header has; it has {len(cells)}"
            problems.append(Problem(path="", rule=rule, suggestion="a cell with a comma must stand in quotes"))
        else:
            if at is not None and cells[at] and _CONTROL.search(cells[at]) is None:
                row_id = cells[at]
            values, problems = _parsed(read, cells)
            if is_strict and not values.get("id") and not any(problem.path == "id" for problem in problems):
                problems.append(Problem(path="id", rule="must not be empty"))
            elif seen.setdefault(row_id, number) != number:
                problems.append(Problem(path="", rule=f"lines {seen[row_id]} and {number} have the same id"))
        if problems:
            left_out.append(RejectedRow(id=row_id, problems=tuple(problems)))
        else:
            rows.append(Row(**values | {"id": row_id}))  # type: ignore[arg-type]  # a column's parser gives its type
    if left_out and (is_strict or not rows):
        every = [(bad.id, problem) for bad in left_out for problem in bad.problems]
        placed = [replace(problem, path=f"{row}, {problem.path}" if problem.path else row) for row, problem in every]
        raise InputError(f"{path} cannot be used", placed)
    return RowFile(rows=tuple(rows), left_out=tuple(left_out), unknown_columns=unknown)


def _parsed(
    columns: Sequence[tuple[int, str, Callable[[str], object]]], cells: Sequence[str]
) -> tuple[dict[str, object], list[Problem]]:
    """The values of one row by column, and the problems of its cells."""
    values: dict[str, object] = {}
    problems: list[Problem] = []
    for place, name, parse in columns:
        cell = cells[place]
        try:
            values[name] = parse(cell) if cell else None
        except ValueError as error:
            convert = CONVERT if name in ("precision", "tflops_kind") else None
            problems.append(Problem(path=name, rule=str(error), value=cell, suggestion=convert))
    return values, problems


def _table(path: str | os.PathLike[str]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header of a CSV file, and its non-empty lines with their numbers. The size is bounded."""
    text, problems = read_text(path, max_bytes=MAX_FILE_BYTES)
    if text is None:
        raise InputError(f"{path} cannot be read", problems)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines: list[tuple[int, list[str]]] = []
    try:
        for cells in reader:
            if any(cells):
                lines.append((reader.line_num, [cell.strip() for cell in cells]))
            if len(lines) > _MAX_ROWS + 1:
                raise InputError(f"{path} has more than {_MAX_ROWS:,} rows: split it")
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: is not valid CSV: {error}") from None
    if not lines:
        raise InputError(f"{path} is empty: expected a header of column names")
    return lines[0][1], lines[1:]


def _check_header(path: str | os.PathLike[str], header: Sequence[str], *, is_strict: bool) -> None:
    unknown = [
        Problem(path=repr(name[:80]), rule="is not a known column", suggestion=did_you_mean(name, COLUMNS))
        for name in dict.fromkeys(header)
        if name not in _PARSERS
    ]
    problems = [
        Problem(path=name, rule=f"is a column {header.count(name)} times", suggestion="keep one")
        for name in dict.fromkeys(header)
        if name in _PARSERS and header.count(name) > 1
    ]
    missing = [name for name in NEEDED if name not in header and (is_strict or name not in MAY_LACK)]
    problems += [Problem(path=name, rule="is a needed column, and missing") for name in missing]
    if "engine" not in header:
        rule = "is text that is not read; the column engine, empty or the name of an engine, shows a converted file"
        problems += [Problem(path=name, rule=rule, suggestion=CONVERT) for name in TEXTS if name in header]
    if problems or (unknown and is_strict):
        problems = unknown + problems
        raise InputError(f"the header of {path} cannot be used", problems)


def _text(cell: str) -> str:
    if len(cell) > MAX_CELL_CHARS:
        raise ValueError(f"must be at most {MAX_CELL_CHARS:,} characters")
    if _CONTROL.search(cell):
        raise ValueError("must be text without control characters")
    return cell


def _word(valid: tuple[str, ...], cell: str) -> str:
    if cell not in valid:
        raise ValueError(f"must be one of {', '.join(valid)}, or empty")
    return cell


def _modules(cell: str) -> tuple[str, ...]:
    modules = tuple(dict.fromkeys(re.findall(r"\w+", cell.lower())))
    if not modules or not set(modules) <= set(_MODULES):
        raise ValueError(f"must be names out of {', '.join(_MODULES)}, with spaces or commas between them, or empty")
    return modules


def _trains(cell: str) -> str:
    try:
        trained = trained_from(cell)
    except InputError as error:
        raise ValueError(f"must be words of --trains: {error}") from None
    unknown = set(trained.targets) - set(known_targets())
    if trained.kind == "frozen" or trained.also or unknown:
        raise ValueError(f"must be all, or lora or qlora beside linear layers out of {', '.join(known_targets())}")
    return cell


def _truth(cell: str) -> bool:
    truth = {"true": True, "false": False}.get(cell.lower())
    if truth is None:
        raise ValueError("must be true or false, or empty")
    return truth


def _number(cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise ValueError("must be a bare number; the unit is in the column's name") from None
    if not isfinite(value) or not 0 < value <= MAX_NUMBER or "_" in cell:
        raise ValueError(f"must be a number above 0 and at most {MAX_NUMBER:g}")
    return value


def _count(least: int, most: float, cell: str) -> int:
    rule = f"must be a whole number of at least {least} and at most {most:g}"
    try:
        value = float(cell)  # programs that know one kind of number write 512.0 and 1.7e9
    except ValueError:
        raise ValueError(rule) from None
    if "_" in cell or not value.is_integer() or not least <= value <= most:
        raise ValueError(rule)
    return int(value)


def _parsers() -> Iterator[tuple[str, Callable[[str], object]]]:
    of_type: dict[str, Callable[[str], object]] = {"str": _text, "bool": _truth, "float": _number}
    for each in fields(Row):
        kind = str(each.type).partition(" ")[0]
        if each.name in ("recompute_modules", "trains"):
            yield each.name, _modules if each.name == "recompute_modules" else _trains
        elif each.name in _WORDS:
            yield each.name, partial(_word, _WORDS[each.name])
        elif kind == "int":
            least, most = int(each.name not in _FROM_ZERO), 3 if each.name == "zero" else MAX_NUMBER
            yield each.name, partial(_count, least, most)
        else:
            yield each.name, of_type[kind]


_PARSERS = dict(_parsers())
