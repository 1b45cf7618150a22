"""The result of a search in words, for tables, messages and reports."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autopar.cost_model.parts import MEMORY
from autopar.ir.explanation import recomputation_of
from autopar.ir.offload import NO_OFFLOAD, offload_in_words
from autopar.ir.rank_order import ORDERS
from autopar.words.numbers import readable_bytes, readable_seconds

SURE = 0.99

if TYPE_CHECKING:
    from autopar.search.result.result import CandidateCounts, SearchResult


def plan_in_words(degrees: Mapping[str, Any]) -> str:
    """The degrees of a result in words.

    >>> plan_in_words({"tp": 8, "dp_shard": 4, "zero": 1, "micro_batch": 2, "accumulate": 8})
    'tp 8 × dp 4 ZeRO-1, micro-batch 2 × 8'
    >>> plan_in_words({"pp": 2, "dp_shard": 4, "zero": 3, "micro_batch": 1, "micro_batches": 4, "schedule": "1f1b"})
    'pp 2 × dp 4 ZeRO-3, micro-batch 1 × 4, 1f1b'
    """
    parts = [_mesh(degrees), _batch(degrees)]
    if degrees.get("pp", 1) > 1:
        stages = degrees.get("virtual_stages", 1)
        parts.append(f"{degrees['schedule']} with {stages} stages a rank" if stages > 1 else str(degrees["schedule"]))
    if degrees.get("order", ORDERS[0]) != ORDERS[0]:
        parts.append(f"rank order {degrees['order']}")
    if degrees.get("recompute", "none") != "none":
        parts.append(recomputation_of(degrees))
    if not degrees.get("regather", True):
        parts.append("gathered inputs are saved")
    if degrees.get("loss_chunks", 1) > 1:
        parts.append(f"loss in {degrees['loss_chunks']} chunks")
    if degrees.get("offload", NO_OFFLOAD) != NO_OFFLOAD:
        parts.append(offload_in_words(degrees["offload"]))
    return ", ".join(parts)


def _mesh(degrees: Mapping[str, Any]) -> str:
    shard, replicate = degrees.get("dp_shard", 1), degrees.get("dp_replicate", 1)
    named = [f"{name} {degrees[name]}" for name in ("pp", "tp", "cp") if degrees.get(name, 1) > 1]
    if shard * replicate > 1:
        named.append(f"dp {shard}" if replicate == 1 else f"dp {shard} sharded × {replicate} replicas")
    if shard * replicate * degrees.get("cp", 1) > 1:
        named[-1] += f" ZeRO-{degrees.get('zero', 3)}"
    if degrees.get("ep", 1) > 1:
        named[-1] += f" (ep {degrees['ep']})"
    return " × ".join(named) or "one device"


def _batch(degrees: Mapping[str, Any]) -> str:
    count = degrees.get("micro_batches", 1) * degrees.get("accumulate", 1)
    return f"micro-batch {degrees.get('micro_batch') or 1} × {count}"


def step_in_words(global_batch: int, sequence: int) -> tuple[str, str]:
    """The batch of a step, and the unit of speed. A model without a sequence dimension has samples.

    >>> step_in_words(128, 4096), step_in_words(64, 1)
    (('128 sequences of 4,096 tokens', 'tokens/s'), ('64 samples', 'samples/s'))
    """
    what, unit = (f"sequences of {sequence:,} tokens", "tokens/s") if sequence > 1 else ("samples", "samples/s")
    return f"{global_batch:,} {what}", unit


def readable_value(value: float, unit: str) -> str:
    """A value of an objective, three digits.

    >>> readable_value(0.0123, "s per sequence"), readable_value(2.5e9, "B"), readable_value(1234.0, "J")
    ('12.3 ms per sequence', '2.5 GB', '1.23 kJ')
    """
    name, _, rest = unit.partition(" ")
    if name == "s":
        text = readable_seconds(value)
    elif name == "B":
        text = readable_bytes(value)
    elif name == "J":
        size, prefix = (value / 1e3, "k") if value >= 1e3 else (value, "")
        text = f"{size:.3g} {prefix}J"
    else:
        text = f"{value:.3g} {name}"
    return f"{text} {rest}".strip()


def chance_in_words(chance: float) -> str:
    """The probability that a plan fits.

    >>> chance_in_words(0.9042), chance_in_words(0.99999)
    ('fits with 90%', 'fits with over 99%')
    """
    return "fits with over 99%" if chance > SURE else f"fits with {chance:.0%}"


def nothing_fits(found: "SearchResult") -> str:
    """The bytes that a device lacks for the closest plan, and the changes that would help."""
    plan = found.closest
    if plan is None:
        return f"no plan fits: {what_does_not_fit(found.counted)}"
    parts = sorted(plan.parts.items(), key=lambda part: -part[1])[:3]
    made_of = ", ".join(f"{MEMORY[name]} {readable_bytes(size)}" for name, size in parts)
    return (
        f"no plan fits: {what_does_not_fit(found.counted)}. "
        f"The closest plan ({plan_in_words(plan.degrees)}) needs {readable_bytes(plan.peak_bytes)}: {made_of}. "
        f"{readable_bytes(plan.missing_bytes)} are missing on a device that has {readable_bytes(found.device_bytes)}, "
        f"because a plan must fit with {found.chance:.0%} (--chance). "
        f"What would help: {plan.remedy}"
    )


def what_does_not_fit(counted: "CandidateCounts") -> str:
    """The number of candidates that do not fit, counted by the largest part of their memory."""
    total = sum(counted.largest.values())
    if not total:
        return "all candidates fit"
    parts = ", ".join(
        f"{MEMORY[name]} in {many / total:.0%}" for name, many in counted.largest.items() if many >= total / 200
    )
    return f"{total:,} of {counted.candidates:,} candidates do not fit (the largest part of memory: {parts})"
