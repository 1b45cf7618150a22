"""The eight iteration times of Korthikanti et al. (2022, arXiv 2205.05198, table 5) as rows, read from data/oracles.md.

    python benchmarks/iteration_times.py      predicts them and prints the errors

Four models of Megatron-LM on A100-80 with tensor parallelism 8: once with full recomputation, once with sequence
parallelism and selective recomputation. Sizes, stages and chunks come from the table of activation memory in the same
file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from autopar.cost_model.published.row import Row
from autopar.cost_model.published.validation import Validation, validate_rows

ORACLES = Path(__file__).parent / "data" / "oracles.md"
TENSOR, SEQUENCE, VOCABULARY = 8, 2048, 51200
_MODELS = "| model | b | L, h, a | p, v |"
_TIMES = "| model | B | GPUs |"


def iteration_times(path: Path = ORACLES) -> list[Row]:
    """The rows, two per model; `step_time_s` is the published time."""
    text = path.read_text(encoding="utf-8")
    shapes = {line[0]: line[1:] for line in _table(text, _MODELS)}
    rows = []
    for model, batch, gpus, full_s, selective_s in _table(text, _TIMES):
        micro_batch, sizes, stages, *_ = shapes[model]
        layers, hidden, heads = _integers(sizes)
        pp, chunks = _integers(stages)
        for recompute, seconds in (("full", full_s), ("selective", selective_s)):
            rows.append(
                Row(
                    id=f"{model}_{recompute}",
                    source_key="megatron_2205_05198",
                    source="Korthikanti et al. 2022 (arXiv 2205.05198), table 5",
                    model=f"GPT {model}",
                    n_params=12 * layers * hidden**2 + 13 * layers * hidden + (VOCABULARY + SEQUENCE) * hidden,
                    layers=layers,
                    hidden=hidden,
                    ffn_hidden=4 * hidden,
                    n_heads=heads,
                    n_kv_heads=heads,
                    head_dim=hidden // heads,
                    vocab=VOCABULARY,
                    tied_embeddings=True,
                    gated_mlp=False,
                    attention_type="mha",
                    seq_len=SEQUENCE,
                    gpu_type="A100-80",
                    gpu_mem_gb=80,
                    num_gpus=int(gpus),
                    gpus_per_node=8,
                    inter_gb_per_s=25.0,
                    tp=TENSOR,
                    sp=recompute == "selective",
                    pp=pp,
                    vpp=chunks,
                    cp=1,
                    ep=1,
                    dp=int(gpus) // (TENSOR * pp),
                    zero=0,
                    micro_batch=int(micro_batch),
                    global_batch=int(batch),
                    grad_accum=int(batch) * TENSOR * pp // (int(gpus) * int(micro_batch)),
                    recompute=recompute,
                    recompute_basis="stated",
                    precision="fp16",
                    optimizer="Adam (mixed precision)",
                    attention="materialised",
                    engine="megatron-2022",
                    outcome="ok",
                    step_time_s=float(seconds),
                    provenance="primary",
                )
            )
    return rows


def _table(text: str, header: str) -> list[list[str]]:
    """The cells of the table that `header` opens."""
    lines = text[text.index(header) :].splitlines()[2:]
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def _integers(cell: str) -> Sequence[int]:
    return [int(number) for number in re.findall(r"\d+", cell)]


def main() -> None:
    """Print predicted beside published."""
    from autopar.cost_model.published.estimate import estimate_rows

    found: Validation = validate_rows(iteration_times(), estimate_rows)
    for one in found.compared:
        assert one.time is not None
        error = "not modelled" if one.time_error is None else f"{one.time_error:+.1%}"
        print(f"{one.row.id:16}{one.time.seconds:>8.2f} s  {error}")
    print(f"mean error {found.overall.step_time.mean or 0.0:.2%}, worst {found.overall.step_time.max or 0.0:.2%}")


if __name__ == "__main__":
    main()
