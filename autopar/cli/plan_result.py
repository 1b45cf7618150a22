"""The result of a search as printed sections: the best plan, the next plans and why they lose, impossible plans."""

from autopar.ir.explanation import Section, readable_bytes, readable_seconds
from autopar.search.result.format import plan_in_words, readable_value, what_does_not_fit
from autopar.search.result.result import Contender, SearchResult


def result_sections(found: SearchResult) -> list[Section]:
    """The best plan first. Raises nothing; `found` has a plan."""
    assert found.best is not None
    beyond = [] if found.beyond is None else [_beyond(found, found.best, found.beyond)]
    return [_best(found, found.best), _others(found), *beyond, _not_possible(found)]


def _best(found: SearchResult, best: Contender) -> Section:
    sequences = f"{found.global_batch:,} sequences of {found.sequence:,} tokens"
    tokens = found.global_batch * found.sequence
    rate = f"{tokens / best.step_s:,.0f} tokens/s, {tokens / best.step_s / best.num_devices:,.0f} of a device"
    value = [] if found.unit == "s" else [f"{found.objective} {readable_value(best.value, found.unit)}"]
    lines = [
        plan_in_words(best.degrees),
        *value,
        f"{readable_seconds(best.step_s)} a step of {sequences}: {rate}",
        f"{readable_bytes(best.needed_bytes)} of {readable_bytes(found.device_bytes)} on the fullest device",
        _proof(found),
        f"engine {found.engine}, {found.precision}, profile {found.profile}; searched in {found.seconds:.1f} s",
    ]
    some = "" if best.num_devices == found.num_devices else f"{best.num_devices:,} of "
    title = f"{found.model} on {found.cluster}, {some}{found.num_devices:,} devices: the best of {_count(found)}"
    return Section(title=title, lines=tuple(lines))


def _count(found: SearchResult) -> str:
    return f"{found.counted.candidates:,} candidates"


def _proof(found: SearchResult) -> str:
    if found.bound is None:
        return f"no candidate fits, but with stages of its own this one does ({found.refined:,} variations tried)"
    if found.saved_by_own_stages:
        return (
            f"proven: no candidate is better as it is ({found.counted.priced:,} priced as they would run); "
            f"stages of its own save {found.saved_by_own_stages:.1%}"
        )
    if found.is_proven:
        return f"proven: no candidate is better ({found.counted.priced:,} priced as they would run)"
    return (
        f"at most {found.gap:.1%} above the bound of what was not priced, {readable_value(found.bound, found.unit)} "
        f"({found.counted.priced:,} priced as they would run)"
    )


def _others(found: SearchResult) -> Section:
    lines, seen = [], set()
    for one in sorted((*found.others, *found.baselines), key=lambda one: one.value):
        words = plan_in_words(one.degrees)
        if one.name and found.best is not None and one.degrees == found.best.degrees and one.fits:
            lines.append(f"the best plan is what people call {one.name}")
        elif words not in seen:
            named = f"{one.name}: " if one.name else ""
            more = f"+{one.value / found.best.value - 1:.1%}" if one.fits and found.best is not None else "no room"
            lines += [f"{more:>8}  {named}{words}", f"{'':8}    {_value(found, one)}; {one.reason}"]
        seen.add(words)
    return Section(title="What comes next, and what people choose by hand", lines=tuple(lines))


def _value(found: SearchResult, one: Contender) -> str:
    step = readable_seconds(one.step_s)
    return step if found.unit == "s" else f"{readable_value(one.value, found.unit)}, {step} a step"


def _beyond(found: SearchResult, best: Contender, one: Contender) -> Section:
    lines = [
        f"{one.value / best.value - 1:+8.1%}  {plan_in_words(one.degrees)}",
        f"{'':8}    {_value(found, one)}",
        *(f"{'':8}    {mark}" for mark in one.formula_only),
    ]
    return Section(title="What if: the best plan of those that autopar prices and does not run", lines=tuple(lines))


def _not_possible(found: SearchResult) -> Section:
    counted = found.counted
    lines = [what_does_not_fit(counted), *(f"tensor degree {tp}: {why}" for tp, why in counted.refused.items())]
    return Section(title="What could not be a plan", lines=tuple(lines))
