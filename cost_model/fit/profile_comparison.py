"""An estimate beside the trace of a real step of the same plan: terms of both by the same names.

    compute          all computation of blocks, with recomputation and the sums of micro-batches' gradients
    tp, dp, cp, ep   exposed collectives of the mesh dimension
    point-to-point   messages between stages
    idle             the pipeline bubble, and waiting for the slowest rank
    other            fixed costs of a step; in a trace, the comparison of ranks before the step

A trace shows one `forward_backward` without the optimizer, so the optimizer is not compared. Compiled code may send in
another order than it was written. Its trace has all collectives on one track, `collectives`, and they are one term.
"""

from collections.abc import Mapping
from typing import Any

from autopar.cost_model.estimate import Estimate
from autopar.cost_model.fit.predicted_vs_measured import ComparedTerm, Comparison, compared_terms
from autopar.cost_model.fit.profile_parts import COMPUTE, IDLE, MESSAGES, measured_parts
from autopar.cost_model.parts import OTHER
from autopar.errors import InputError, Problem
from autopar.ir.cluster import ClusterSpec, Tier
from autopar.ir.rank_order import ORDERS, strides

TOGETHER, REST, ALL_RANKS = "collectives", "other", "all ranks"
_DEGREES = (
    "pp", "tp", "dp_shard", "dp_replicate", "zero", "micro_batch", "micro_batches", "accumulate", "schedule",
    "virtual_stages", "recompute", "recompute_blocks",
)  # fmt: skip
REMEDIES = {
    COMPUTE: "measure what kernels reach here with `autopar calibrate`",
    IDLE: "it follows from the schedule and the other terms; more micro-batches or other cuts shorten it",
    MESSAGES: "measure links with `autopar calibrate` on several ranks",
    REST: "no constant of a profile stands behind it",
}
LINKS = "measure its links with `autopar calibrate` on as many ranks"


def predicted_parts(estimate: Estimate) -> dict[str, float]:
    """Seconds by term, without the optimizer."""
    parts = {COMPUTE: sum(estimate.compute_s.values()), IDLE: 0.0, REST: 0.0}
    parts[COMPUTE] += estimate.other_s[OTHER["gradient accumulation"]]
    parts[IDLE] += estimate.other_s[OTHER["bubble"]] + estimate.other_s[OTHER["stragglers"]]
    parts[REST] += estimate.other_s[OTHER["fixed"]]
    for sent in estimate.collectives:
        name = MESSAGES if sent.mesh_dim == "pp" else sent.mesh_dim
        parts[name] = parts.get(name, 0.0) + sent.exposed_s
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def compare_trace(estimate: Estimate, trace: Mapping[str, Any], *, band: float) -> Comparison:
    """The estimate of a plan beside a trace of its step."""
    _check_same(estimate, trace.get("otherData"))
    measured: dict[str, float] = {}
    for track, seconds in measured_parts(trace).items():
        name = _term_of(track)
        measured[name] = measured.get(name, 0.0) + seconds
    predicted = predicted_parts(estimate)
    if TOGETHER in measured:
        for name in ("tp", "dp", "cp", "ep"):
            for parts in (predicted, measured):
                parts[TOGETHER] = parts.get(TOGETHER, 0.0) + parts.pop(name, 0.0)
    return compared_terms(predicted, measured, band=band)


def _term_of(track: str) -> str:
    """The term of a track: ``dp_shard`` belongs to ``dp``, ``tp0`` to ``tp``, sums of tied weights to messages."""
    if track == ALL_RANKS:
        return REST
    name = track.split("_")[0].rstrip("0123456789")
    return MESSAGES if name == "pp" else name


def _check_same(estimate: Estimate, about: Any) -> None:
    """Raise InputError if the trace states another plan than the priced one. Older traces state fewer fields."""
    said = about if isinstance(about, Mapping) else {}
    traced = said.get("degrees")
    degrees: Mapping[str, Any] = traced if isinstance(traced, Mapping) else {}
    pairs: list[tuple[str, Any, Any]] = [
        ("ranks", said.get("world_size"), estimate.num_devices),
        ("tokens", said.get("sequence"), estimate.sequence),
        ("parameters", said.get("parameters"), estimate.num_parameters),
    ]
    for name in _DEGREES:
        is_idle = (name == "zero" and estimate.degrees.get("dp_shard") == 1) or (
            name in ("schedule", "virtual_stages") and estimate.degrees.get("pp") == 1
        )
        if not is_idle:
            there = degrees.get(name)
            pairs.append((name, tuple(there) if isinstance(there, list) else there, estimate.degrees.get(name)))
    problems = [
        Problem(path=name, value=there, rule=f"in the trace; {here} was estimated")
        for name, there, here in pairs
        if there is not None and here is not None and there != here
    ]
    if problems:
        raise InputError("the trace is not of the plan that was estimated", problems)


def sentence(comparison: Comparison) -> str:
    """The term that is off the most, and the remedy."""
    if not comparison.outside:
        return f"no term is off by more than {comparison.band:.0%} and a hundredth of the step"
    worst = comparison.outside[0]
    return f"off the most is {worst}: {remedy(worst)}"


def remedy(term: ComparedTerm) -> str:
    return REMEDIES.get(term.name, LINKS)


def tiers_of(cluster: ClusterSpec, degrees: Mapping[str, Any]) -> dict[str, Tier]:
    """The slowest tier that each term's groups cross, by how far their last rank lies from their first."""
    sizes = {"tp": degrees["tp"], "dp": degrees["dp_shard"] * degrees["dp_replicate"], "pp": degrees["pp"]}
    lie = strides(degrees.get("order", ORDERS[0]), sizes)
    far = {name: (size - 1) * lie[name] for name, size in sizes.items()}
    spans = {"tp": far["tp"], "dp": far["dp"], MESSAGES: min(far["pp"], lie["pp"]), TOGETHER: far["tp"] + far["dp"]}
    last = cluster.num_devices - 1
    return {name: cluster.tier(0, min(span, last)) for name, span in spans.items() if span}
