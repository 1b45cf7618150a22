"""The full single-node sweep of vTrain, which comes with twelve columns of its own.

Source: VIA-Research/vTrain, data/ground_truth_single.csv (validation data of "vTrain: A Simulation Framework for
Evaluating Cost-effective and Compute-optimal Large Language Model Training", MICRO 2024). `_SAME` has the facts that
all runs share. The source does not state memory size, ZeRO stage and tied embeddings.
"""

from __future__ import annotations

import os
from dataclasses import replace

from autopar.cost_model.published.row import Row, RowFile, parse_rows, read_row_file, read_table

_COLUMNS = (
    *("group", "num_gpus", "global_batch", "micro_batch", "hidden", "n_heads", "layers", "seq_len"),
    *("tp", "dp", "pp", "step_time_s"),
)
VOCABULARY = 50257  # the default of vTrain's simulator
_SAME = Row(
    id="vtrain_sweep",
    source_key="vtrain_single",
    source="VIA-Research/vTrain data/ground_truth_single.csv (MICRO 2024 validation)",
    tier="extended",
    vocab=VOCABULARY,
    gated_mlp=False,
    attention_type="mha",
    gpu_type="A100",
    gpus_per_node=8,
    intra_link="NVSwitch (simulator config: 150GB/s)",
    inter_link="single node",
    sp=False,
    vpp=1,
    cp=1,
    ep=1,
    recompute="full",
    recompute_basis="repo validation configs (use_checkpoint=true)",
    precision="fp16",
    optimizer="Adam",
    attn_impl="unfused (fused softmax)",
    framework="Megatron-DeepSpeed style",
    outcome="ok",
    provenance="primary",
)


def read_runs(path: str | os.PathLike[str]) -> list[Row]:
    """Rows of a file with the columns of `Row`, or with the columns of the sweep in any order; strict."""
    return list(read_run_file(path, is_strict=True).rows)


def read_run_file(path: str | os.PathLike[str], *, is_strict: bool = False) -> RowFile:
    """As `read_row_file`, also for a file with the columns of the sweep in any order."""
    header, _ = read_table(path)
    read = read_vtrain_sweep if sorted(header) == sorted(_COLUMNS) else read_row_file
    return read(path, is_strict=is_strict)


def read_vtrain_sweep(path: str | os.PathLike[str], *, is_strict: bool = False) -> RowFile:
    """The sweep's runs as rows, named after their lines; raises `InputError` as `read_row_file` does."""
    header, lines = read_table(path)
    named = [(number, [*cells, f"{_SAME.id}_{number}"]) for number, cells in lines]
    found = parse_rows(path, [*header, "id"], named, is_strict=is_strict)
    return replace(found, rows=tuple(_completed(row) for row in found.rows))


def _completed(row: Row) -> Row:
    own = {name: getattr(row, name) for name in ("id", *_COLUMNS)}
    made = replace(_SAME, **own)
    if row.layers is None or row.hidden is None:
        return made
    return replace(
        made,
        model=f"GPT L{row.layers} h{row.hidden}",
        n_params=12 * row.layers * row.hidden**2 + VOCABULARY * row.hidden,
        ffn_hidden=4 * row.hidden,
        n_kv_heads=row.n_heads,
        head_dim=row.hidden // row.n_heads if row.n_heads else None,
        grad_accum=row.global_batch // (row.dp * row.micro_batch)
        if row.global_batch and row.dp and row.micro_batch
        else None,
    )
