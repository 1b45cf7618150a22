"""A prediction beside a measured step: which term is off, and the profile with the constant behind it corrected.

Terms are seconds by name. `autopar.cost_model.fit.profile_parts` lists the terms of a trace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Literal, TypeAlias

from autopar.cost_model.fit.log_least_squares import rounded, rounded_s
from autopar.cost_model.fit.sources import with_sources
from autopar.cost_model.machine.profile import CallCost, DeviceProfile, LinkProfile
from autopar.errors import InputError, Problem
from autopar.ir.cluster import Tier
from autopar.words.numbers import readable_seconds

BAND = 0.1  # of the measured time: predictions within it are right
_NOTABLE = 0.01  # of the measured step: a term that is off by less is not reported
Constant: TypeAlias = Literal["compute"] | Tier  # what is behind a term
_NOBODYS = ("idle", "other")  # what follows from the schedule and the other terms
_MAX_PART, _MAX_SOURCE = 2.0, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTerm:
    """One part of a step, in seconds."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def off_s(self) -> float:
        """Seconds by which the prediction is too short; below 0 if it is too long."""
        return self.measured_s - self.predicted_s

    def __str__(self) -> str:
        predicted, measured = readable_seconds(self.predicted_s), readable_seconds(self.measured_s)
        share = f" ({self.predicted_s / self.measured_s - 1:+.0%})" if self.measured_s else ""
        return f"{self.name}: predicted {predicted}, measured {measured}{share}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Every term, the one that is off by most seconds first."""

    terms: tuple[ComparedTerm, ...]
    band: float

    @property
    def total(self) -> ComparedTerm:
        predicted, measured = (sum(getattr(t, key) for t in self.terms) for key in ("predicted_s", "measured_s"))
        return ComparedTerm(name="step", predicted_s=predicted, measured_s=measured)

    @property
    def outside(self) -> tuple[ComparedTerm, ...]:
        """The terms outside the band, by more than a hundredth of the step."""
        notable = _NOTABLE * max(self.total.measured_s, self.total.predicted_s)
        return tuple(t for t in self.terms if abs(t.off_s) > max(notable, self.band * t.measured_s))


def compared_terms(
    predicted_parts: Mapping[str, float], measured_parts: Mapping[str, float], *, band: float = BAND
) -> Comparison:
    """Compare terms by name. Raises InputError if a time is negative or no number, or if there are no times."""
    problems = [
        Problem(path=f"{side}.{name}", value=value, rule="must be a finite number of seconds, at least 0")
        for side, parts in (("predicted", predicted_parts), ("measured", measured_parts))
        for name, value in parts.items()
        if not 0 <= value < float("inf")
    ]
    if not problems and not (predicted_parts and measured_parts):
        problems.append(Problem(path="", rule="needs at least one predicted and one measured part"))
    if problems:
        raise InputError("the prediction cannot be compared", problems)
    terms = [
        ComparedTerm(name=name, predicted_s=predicted_parts.get(name, 0.0), measured_s=measured_parts.get(name, 0.0))
        for name in {*predicted_parts, *measured_parts}
    ]
    return Comparison(terms=tuple(sorted(terms, key=lambda t: (-abs(t.off_s), t.name))), band=band)


def corrected(
    profile: DeviceProfile,
    comparison: Comparison,
    *,
    tiers: Mapping[str, Tier] | None = None,
    today: date | None = None,
) -> DeviceProfile:
    """`profile` with the constants behind the terms outside the band scaled, so that these terms come out as measured.

    `tiers` says which links a term's mesh dimension crosses, ``in_host`` if it says nothing. Waiting belongs to no
    constant and stays. The source of each number states its change and the reason.
    """
    day, scaled = (today or date.today()).isoformat(), profile
    known = tiers or {}
    for name, terms in terms_by_constant(comparison, lambda name: known.get(name, "in_host")).items():
        why = f"{day}: {'; '.join(map(str, terms))}"
        if name == "compute":
            scaled = _scaled_compute(scaled, ratio_of(terms), why)
        else:
            scaled = _scaled_link(scaled, name, ratio_of(terms), why)
    return scaled


def terms_by_constant(
    comparison: Comparison, tier_of: Callable[[str], Tier | None]
) -> dict[Constant, list[ComparedTerm]]:
    """The terms outside the band by what is behind them: computing, or the tier of a mesh dimension's links."""
    terms: dict[Constant, list[ComparedTerm]] = {}
    for term in comparison.outside:
        name: Constant | None = "compute" if term.name == "compute" else tier_of(term.name)
        if name is not None and term.name not in _NOBODYS and term.predicted_s and term.measured_s:
            terms.setdefault(name, []).append(term)
    return terms


def ratio_of(terms: Sequence[ComparedTerm]) -> float:
    """The measured over the predicted time of terms."""
    return sum(t.measured_s for t in terms) / sum(t.predicted_s for t in terms)


def scaled_term(profile: DeviceProfile, term: str, factor: float, why: str) -> DeviceProfile:
    """`profile` with the constants of ``compute`` or of a tier scaled, for `factor` times the time of the term."""
    for tier in profile.links:
        if tier == term:
            return _scaled_link(profile, tier, factor, why)
    return _scaled_compute(profile, factor, why) if term == "compute" else profile


def _scaled_compute(profile: DeviceProfile, factor: float, why: str) -> DeviceProfile:
    """The constants of computing, for `factor` times as much time."""
    parts = {key: _part(getattr(profile.attention, key) / factor) for key in ("forward", "backward", "products")}
    scaled = replace(
        profile,
        efficiency={d: _part(value / factor) for d, value in profile.efficiency.items()},
        attention=replace(profile.attention, **parts),
        memory_efficiency=_part(profile.memory_efficiency / factor),
        launch_s=rounded_s(profile.launch_s * factor),
        host_launch_s=rounded_s(profile.host_launch_s * factor),
    )
    paths = ["efficiency", *(f"attention.{key}" for key in parts), "memory_efficiency", "launch_us", "host_launch_us"]
    return _noted(scaled, paths, factor, why)


def _scaled_link(profile: DeviceProfile, tier: Tier, factor: float, why: str) -> DeviceProfile:
    def scaled(call: CallCost) -> CallCost:
        return CallCost(efficiency=_part(call.efficiency / factor), call_s=rounded_s(call.call_s * factor))

    old = profile.link(tier)
    link = replace(old.link, latency_s=rounded_s(old.link.latency_s * factor)) if old.link is not None else None
    new = LinkProfile(usual=scaled(old.usual), kinds={k: scaled(c) for k, c in old.kinds.items()}, link=link)
    return _noted(replace(profile, links={**profile.links, tier: new}), [f"links.{tier}"], factor, why)


def _noted(profile: DeviceProfile, paths: list[str], factor: float, why: str) -> DeviceProfile:
    """The profile with the reason of a change behind the source of each number. It replaces an earlier reason."""
    note = f"; scaled for {factor:.3g} times the time on {why}"[:250]
    return with_sources(
        profile, paths, lambda before: before.split("; scaled for ")[0][: _MAX_SOURCE - len(note)] + note
    )


def _part(value: float) -> float:
    return min(_MAX_PART, rounded(value))
