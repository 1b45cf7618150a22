"""Fit links to the times of collectives: seconds = call + hops · latency + bytes sent / (bandwidth · efficiency).

Each kind of collective has its own `call` and `efficiency`. Latency and bandwidth are the tier's. Groups of several
sizes tell the call from the hops. With one size, the latency is as large as the times allow. Otherwise larger groups
would be priced too low.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_model.fit.log_least_squares import fit_errors, log_loss, rounded, rounded_s
from autopar.cost_model.machine.collectives import hops, sent_bytes
from autopar.cost_model.machine.kernel_times import collective_seconds
from autopar.cost_model.machine.profile import KINDS, CallCost, CollectiveKind, FitError, LinkProfile
from autopar.ir.arrays import Floats
from autopar.ir.cluster import Tier
from autopar.ir.device import Link
from autopar.ir.samples import Sample

LATENCIES_S = tuple(rounded_s(1e-7 * 10 ** (i / 6)) for i in range(31))  # 0.1 us to 10 ms
ALIKE, ALIKE_EACH = 1.02, 1e-4  # losses so near one another, or 1 % a time, do not decide between latencies
LEAST_PART, MOST_PART = 1e-4, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTier:
    profile: LinkProfile
    errors: Mapping[CollectiveKind, FitError]


def fit_links(samples: Sequence[Sample], link: Link | None = None) -> dict[Tier, FittedTier]:
    """The fit of every measured tier."""
    tiers: dict[Tier, list[Sample]] = {}
    for sample in samples:
        tiers.setdefault("inter_host" if sample.work.numbers["hosts"] > 1 else "in_host", []).append(sample)
    return {tier: _fit_tier(group, link if tier == "in_host" else None) for tier, group in tiers.items()}


def sent_and_hops(kind: CollectiveKind, whole_bytes: float, ranks: int) -> tuple[float, int]:
    """Bytes that one rank sends and the steps it takes; a message to one rank is one step."""
    if kind == "point_to_point":
        return whole_bytes, 1
    return sent_bytes(kind, whole_bytes, ranks), hops(kind, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    sent: Floats
    hops: Floats
    seconds: Floats


def _columns(kind: CollectiveKind, samples: Sequence[Sample]) -> _Columns:
    group = [s for s in samples if s.work.name == kind]
    pairs = [sent_and_hops(kind, s.work.amount, int(s.work.numbers["ranks"])) for s in group]
    return _Columns(
        sent=np.array([sent for sent, _ in pairs]),
        hops=np.array([float(steps) for _, steps in pairs]),
        seconds=np.array([s.seconds for s in group]),
    )


def _fit_tier(samples: Sequence[Sample], known: Link | None) -> FittedTier:
    columns = {kind: timed for kind in KINDS if len((timed := _columns(kind, samples)).seconds)}
    fastest = max(float(np.max(c.sent / c.seconds)) for c in columns.values())
    bandwidth = known.bytes_per_s if known is not None else float(round(float(f"{fastest:.4g}")))
    latency = known.latency_s if known is not None else _latency(columns, bandwidth)
    calls = {kind: _fit_call(c, bandwidth, latency) for kind, c in columns.items()}
    short = {kind: CallCost(efficiency=rounded(c.efficiency), call_s=rounded_s(c.call_s)) for kind, c in calls.items()}
    usual = CallCost(
        efficiency=rounded(float(np.median([c.efficiency for c in short.values()]))),
        call_s=rounded_s(float(np.median([c.call_s for c in short.values()]))),
    )
    link = None if known is not None else Link(bytes_per_s=bandwidth, latency_s=latency, name="measured")
    errors = {kind: fit_errors(_times(c, short[kind], bandwidth, latency), c.seconds) for kind, c in columns.items()}
    return FittedTier(profile=LinkProfile(usual=usual, kinds=short, link=link), errors=errors)


def _latency(columns: Mapping[CollectiveKind, _Columns], bandwidth: float) -> float:
    """The largest of the latencies that predict best: from a grid, then from a finer grid around its best point."""

    def loss(latency: float) -> float:
        times = {kind: _times(c, _fit_call(c, bandwidth, latency), bandwidth, latency) for kind, c in columns.items()}
        return sum(float(log_loss(times[kind], c.seconds)) * len(c.seconds) for kind, c in columns.items())

    def largest(losses: Mapping[float, float]) -> float:
        allowed = min(losses.values()) * ALIKE + ALIKE_EACH * num_times
        return max(latency for latency, off in losses.items() if off <= allowed)

    num_times = sum(len(c.seconds) for c in columns.values())
    losses = {latency: loss(latency) for latency in LATENCIES_S}
    around = (rounded_s(largest(losses) * 2**x) for x in np.linspace(-1, 1, 41))
    return largest(losses | {latency: loss(latency) for latency in around})


def _times(columns: _Columns, call: CallCost, bandwidth: float, latency: float) -> Floats:
    return collective_seconds(
        sent_bytes=columns.sent, hops=columns.hops, bytes_per_s=bandwidth, latency_s=latency, call=call
    )


def _fit_call(columns: _Columns, bandwidth: float, latency: float) -> CallCost:
    """Call and efficiency within their legal ranges, by linear least squares on relative errors.

    The time is linear in `call` and in 1 / `efficiency`. Near a good fit predicted / measured - 1 is nearly the
    logarithm of predicted / measured.
    """
    weight = 1 / columns.seconds
    ones, moving = weight, columns.sent / bandwidth * weight
    rest = 1 - columns.hops * latency * weight
    (aa, ab), (_, bb) = np.array([ones, moving]) @ np.array([ones, moving]).T
    ay, by = float(rest @ ones), float(rest @ moving)
    determinant = float(aa * bb - ab**2)
    call_s, inverse = 0.0, 0.0
    if determinant > 1e-9 * aa * bb:  # not all of one size
        call_s, inverse = float(ay * bb - by * ab) / determinant, float(by * aa - ay * ab) / determinant
    if call_s <= 0:  # the best with no call at all
        call_s, inverse = 0.0, by / float(bb)
    if inverse < 1 / MOST_PART:  # latency alone is more than the measured time
        inverse = 1 / MOST_PART
        call_s = max(0.0, float((rest - inverse * moving) @ ones) / float(ones @ ones))
    return CallCost(efficiency=min(MOST_PART, max(LEAST_PART, 1 / inverse)), call_s=call_s)
