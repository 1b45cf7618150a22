"""The sets of published runs by audience: for whom the figures of docs/validation.md hold."""

from collections.abc import Sequence
from pathlib import Path

from autopar.cost_model.published.estimate import estimate_rows
from autopar.cost_model.published.machine import memory_bytes_of
from autopar.cost_model.published.row import Row, read_rows
from autopar.cost_model.published.validation import RowComparison, compared_rows
from autopar.ir.device_presets import device_preset

DATA = Path(__file__).resolve().parents[1] / "benchmarks" / "data"
SMALL_BYTES = 26e9  # of a card that is sold with at most 24 GB


def audiences() -> dict[str, Sequence[RowComparison]]:
    """The compared rows of every audience. Publishers of a held set were never looked at."""
    vendors, users = _core("published_runs"), [*_core("ordinary_runs"), *_core("users_runs")]
    held, held_lora = _core("users_held_runs"), _core("users_held_lora_runs")
    lora = [*_core("lora_runs"), *_core("users_lora_runs")]
    return {
        "vendors' clusters": [one for one in vendors if not one.row.moe_experts],
        "experts": [one for one in vendors if one.row.moe_experts],
        "users' machines": users,
        "cards of at most 24 GB": [one for one in users if _is_small(one.row)],
        "LoRA": [one for one in lora if one.row.trains],
        "users' machines, held back": held,
        "cards of at most 24 GB, held back": [one for one in held if _is_small(one.row)],
        "LoRA, held back": held_lora,
    }


def _core(name: str) -> Sequence[RowComparison]:
    return compared_rows([row for row in read_rows(DATA / f"{name}.csv") if row.tier == "core"], estimate_rows)


def _is_small(row: Row) -> bool:
    return bool(row.gpu_type) and memory_bytes_of(device_preset(row.gpu_type or ""), row.gpu_mem_gb) < SMALL_BYTES
