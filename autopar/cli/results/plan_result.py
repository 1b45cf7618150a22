"""The result of a search as printed sections: the best plan, the next plans with reasons, the candidates ruled out."""

from collections.abc import Iterator, Sequence

from autopar.cost_model.machine.fitted_constants import usable_in_words
from autopar.ir.explanation import Section, readable_bytes, readable_rate, readable_seconds
from autopar.search.result.format import plan_in_words, readable_value, what_does_not_fit
from autopar.search.result.result import Contender, SearchResult

MOST_MEASURED = 2  # plans beside the best plan


def result_sections(found: SearchResult) -> list[Section]:
    """The best plan first. Raises nothing; `found` has a plan."""
    assert found.best is not None
    return [_best(found, found.best), _others(found), _not_possible(found)]


def _best(found: SearchResult, best: Contender) -> Section:
    has_tokens = found.sequence > 1  # a model without a sequence dimension has samples
    of_a_step = f"{found.global_batch:,} " + (f"sequences of {found.sequence:,} tokens" if has_tokens else "samples")
    counted = found.global_batch * found.sequence
    unit = "tokens" if has_tokens else "samples"
    rates = [readable_rate(counted / best.step_s / devices) for devices in (1, best.num_devices)]
    rate = f"{rates[0]} {unit}/s, {rates[1]} of a device"
    value = [] if found.unit == "s" else [f"{found.objective} {readable_value(best.value, found.unit)}"]
    lines = [
        plan_in_words(best.degrees),
        *value,
        f"{readable_seconds(best.step_s)} a step of {of_a_step}: {rate}",
        f"{readable_bytes(best.needed_bytes)} of {readable_bytes(found.device_bytes)} on the fullest device",
        usable_in_words(found.device_bytes),
        *_interval(found),
        _proof(found),
        *(note for note in found.notes if found.plan is None or note not in found.plan.notes),
        f"engine {found.engine}, profile {found.profile}; searched in {found.seconds:.1f} s",
    ]
    some = "" if best.num_devices == found.num_devices else f"{best.num_devices:,} of "
    where = f"{some}{found.num_devices:,} device{'s' * (found.num_devices > 1)}, {found.precision}"
    title = f"{found.model} on {found.cluster}, {where}: the best of {_count(found)}"
    return Section(title=title, lines=tuple(lines))


def _interval(found: SearchResult) -> Iterator[str]:
    """The intervals of step time and memory."""
    if found.step_interval_s is not None and found.needed_interval_bytes is not None:
        step = " to ".join(map(readable_seconds, found.step_interval_s))
        needed = " to ".join(map(readable_bytes, found.needed_interval_bytes))
        yield f"in 4 of 5 published runs a measurement was in the interval: {step} a step, {needed}"


def _count(found: SearchResult) -> str:
    return f"{found.counted.candidates:,} candidates"


def _proof(found: SearchResult) -> str:
    priced = f"{found.counted.priced:,} priced exactly"
    if found.bound is None and found.best is not None and found.best.degrees.get("loss_chunks", 1) > 1:
        return "no candidate fits with whole logits; with the loss in chunks this plan does"
    if found.bound is None:
        return f"no candidate fits; with refined stages this plan does ({found.refined:,} variations tried)"
    if found.saved_by_own_stages:
        saved = f"{found.saved_by_own_stages:.1%}"
        return f"proven: before refining, no candidate is better ({priced}); refining its stages saves {saved}"
    if found.is_proven:
        return f"proven: no candidate is better ({priced}, lower bounds rule out the rest)"
    if not found.bound:
        return f"not proven: the time ended before all plans had a lower bound ({priced})"
    bound = readable_value(found.bound, found.unit)
    return f"not proven: a candidate may be up to {found.gap:.1%} better ({priced}, no lower bound below {bound})"


def _others(found: SearchResult) -> Section:
    shown = {}  # by the plan in words: how much more than the best plan, the plan with its name, the reason
    for one in sorted((*found.baselines, *found.others), key=lambda one: one.value):
        words = plan_in_words(one.degrees)
        if one.name and found.best is not None and one.degrees == found.best.degrees and one.fits:
            shown[words] = ("best", f"{one.name} is the best plan", "")
        elif words not in shown:
            named = f"{one.name}: {words}" if one.name else words
            shown[words] = (_more(found, one), named, "; ".join(filter(None, (_value(found, one), one.reason))))
    lines = [*_aligned(list(shown.values())), *_worth_measuring(found)] or ["no other plan was priced"]
    return Section(title="Next plans, and plans that people choose by hand", lines=tuple(lines))


def _worth_measuring(found: SearchResult) -> Iterator[str]:
    """The next plans that a measurement may put before the best plan."""
    alike = found.like_best
    if alike:
        plans = "plan" if len(alike) == 1 else f"{len(alike)} plans"
        yield (
            f"a measurement may put the next {plans} before the best plan; measure the best plan and the next "
            f"{min(len(alike), MOST_MEASURED)}"
        )


def _more(found: SearchResult, one: Contender) -> str:
    """How much larger a plan's value is than the best value."""
    if not one.fits or found.best is None:
        return "too big"
    more = one.value / found.best.value - 1
    return f"+{more:,.1%}" if more >= 0.0005 else "<0.1%"


def _aligned(shown: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Two lines for each plan; the first column is as wide as its longest entry."""
    width = max((len(more) for more, _, _ in shown), default=0)
    for more, plan, reason in shown:
        yield f"{more:>{width}}  {plan}"
        if reason:
            yield f"{'':{width}}    {reason}"


def _value(found: SearchResult, one: Contender) -> str:
    step = readable_seconds(one.step_s)
    return step if found.unit == "s" else f"{readable_value(one.value, found.unit)}, {step} a step"


def _not_possible(found: SearchResult) -> Section:
    counted = found.counted
    lines = [what_does_not_fit(counted), *(f"{degrees}: {why}" for degrees, why in counted.refused.items())]
    return Section(title="Candidates that were ruled out", lines=tuple(lines))
