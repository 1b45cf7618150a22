"""A prediction beside a measured step: which term is off, and the profile with the constant behind it corrected.

Terms are seconds by name, with dots from the whole to its parts: ``compute.matmul`` is a part of ``compute``. If one
side is finer than the other, its parts are summed. `autopar.cost_model.fit.profile_parts` lists the terms of a trace.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date

from autopar.cost_model.fit.log_least_squares import rounded, rounded_s
from autopar.cost_model.machine.profile import CallCost, DeviceProfile, LinkProfile
from autopar.errors import InputError, Problem
from autopar.ir.cluster import Tier
from autopar.words.numbers import readable_seconds

BAND = 0.1  # of the measured time: predictions within it are right
_NOTABLE = 0.01  # of the measured step: a term that is off by less is not reported
_COMPUTE = ("compute", "matmul", "attention", "memory", "optimizer", "launch", "host")
_NOBODYS = ("idle", "bubble", "other")  # what follows from the schedule and the other terms
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
    names = {*predicted_parts, *measured_parts}
    coarse = {name: next((w for w in _wholes(name) if w in names), name) for name in names}
    terms = [
        ComparedTerm(
            name=whole,
            predicted_s=sum(value for name, value in predicted_parts.items() if coarse[name] == whole),
            measured_s=sum(value for name, value in measured_parts.items() if coarse[name] == whole),
        )
        for whole in set(coarse.values())
    ]
    return Comparison(terms=tuple(sorted(terms, key=lambda t: (-abs(t.off_s), t.name))), band=band)


def _wholes(name: str) -> list[str]:
    """The names above a name, the coarsest first: ``a`` and ``a.b`` of ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


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
    links: dict[Tier, list[ComparedTerm]] = {}
    for term in comparison.outside:
        kind = term.name.split(".")[-1]
        if kind in _NOBODYS or not (term.predicted_s and term.measured_s):
            continue
        if kind in _COMPUTE:
            scaled = _scaled_compute(scaled, kind, term.measured_s / term.predicted_s, f"{day}: {term}")
        else:
            links.setdefault((tiers or {}).get(kind, "in_host"), []).append(term)
    for tier, terms in links.items():
        factor = sum(t.measured_s for t in terms) / sum(t.predicted_s for t in terms)
        scaled = _scaled_link(scaled, tier, factor, f"{day}: {'; '.join(str(t) for t in terms)}")
    return scaled


def scaled_term(profile: DeviceProfile, term: str, factor: float, why: str) -> DeviceProfile:
    """`profile` with the constants of ``compute`` or of a tier scaled, for `factor` times the time of the term."""
    for tier in profile.links:
        if tier == term:
            return _scaled_link(profile, tier, factor, why)
    return _scaled_compute(profile, term, factor, why)


def _scaled_compute(profile: DeviceProfile, kind: str, factor: float, why: str) -> DeviceProfile:
    """The constants of a kind of compute, for `factor` times as much time."""
    scaled, paths = profile, list[str]()
    if kind in ("compute", "matmul"):
        scaled = replace(scaled, efficiency={d: _part(value / factor) for d, value in profile.efficiency.items()})
        paths += [f"efficiency.{dtype}" for dtype in profile.efficiency]
    if kind in ("compute", "attention"):
        parts = {key: _part(getattr(profile.attention, key) / factor) for key in ("forward", "backward", "products")}
        scaled = replace(scaled, attention=replace(profile.attention, **parts))
        paths += [f"attention.{key}" for key in parts]
    if kind in ("compute", "memory", "optimizer"):
        scaled = replace(scaled, memory_efficiency=_part(profile.memory_efficiency / factor))
        paths.append("memory_efficiency")
    if kind in ("compute", "launch"):
        scaled = replace(scaled, launch_s=rounded_s(profile.launch_s * factor))
        paths.append("launch_us")
    if kind in ("compute", "launch", "host"):
        scaled = replace(scaled, host_launch_s=rounded_s(profile.host_launch_s * factor))
        paths.append("host_launch_us")
    return _noted(scaled, paths, factor, why)


def _scaled_link(profile: DeviceProfile, tier: Tier, factor: float, why: str) -> DeviceProfile:
    def scaled(call: CallCost) -> CallCost:
        return CallCost(efficiency=_part(call.efficiency / factor), call_s=rounded_s(call.call_s * factor))

    old = profile.link(tier)
    link = replace(old.link, latency_s=rounded_s(old.link.latency_s * factor)) if old.link is not None else None
    new = LinkProfile(usual=scaled(old.usual), kinds={k: scaled(c) for k, c in old.kinds.items()}, link=link)
    ends = ["", *(f".kinds.{kind}" for kind in old.kinds)]
    paths = [f"links.{tier}{end}.{key}" for end in ends for key in ("efficiency", "call_us")]
    return _noted(replace(profile, links={**profile.links, tier: new}), paths, factor, why)


def _noted(profile: DeviceProfile, paths: list[str], factor: float, why: str) -> DeviceProfile:
    """The profile with the reason of a change behind the source of each number. It replaces an earlier reason."""
    note = f"; scaled for {factor:.3g} times the time on {why}"[:250]
    sources = dict(profile.sources)
    for path in paths:
        before = sources.get(path, "assumed: no source was given").split("; scaled for ")[0]
        sources[path] = before[: _MAX_SOURCE - len(note)] + note
    return replace(profile, sources=sources)


def _part(value: float) -> float:
    return min(_MAX_PART, rounded(value))
