"""The result of a measured search in sentences, for the page and for the command."""

from autopar.report.numbers import amount, capped, percent, readable_seconds
from autopar.report.words import degrees_in_words
from autopar.search.measured.belief import NOTABLE
from autopar.search.measured.result import TuneResult
from autopar.search.result.result import ON_FEWER_DEVICES, UNITS

_FASTEST = {"cost": "costs least as", "energy": "takes least energy as", "memory": "needs least memory as"}


def best_in_words(found: TuneResult) -> str:
    """The best plan in words, and its measured step. Empty if no trial ran."""
    if found.best is None or found.step_s is None or found.tokens_per_s is None:
        return ""
    best = found.tried[found.best]
    devices = best.candidate.num_devices
    batch = f"{found.global_batch:,} "
    batch += f"sequences of {found.sequence:,} tokens" if found.sequence > 1 else "samples"
    spent = ""
    if found.objective in ON_FEWER_DEVICES:
        spent = f" and {found.step_s * best.candidate.per_second:.3g} {UNITS[found.objective]}"
    return (
        f"On {devices:,} device{'s' * (devices != 1)} {capped(found.model)} "
        f"{_FASTEST.get(found.objective, 'runs fastest as')} {degrees_in_words(best.candidate.degrees)}. "
        f"A measured step of {batch} takes {readable_seconds(found.step_s)}{spent}, "
        f"that is {amount(found.tokens_per_s, unit_of(found))}."
    )


def gain_in_words(found: TuneResult) -> str:
    """The probable gain of measuring on, in sentences."""
    count = num_open(found)
    if not count:
        return "Every plan was tried or cannot run, so measuring on gains nothing."
    plans = f"{count:,} plan{'s were' if count > 1 else ' was'} not measured"
    if found.best is None:
        return f"No trial ran, so nothing is known of the gain. {plans}."
    which = "one of them" if count > 1 else "it"
    chance = f"With a chance of at most {percent(found.chance_left)} {which} is more than {percent(NOTABLE)} faster."
    gain = f"One more trial would save {percent(found.gain_left, 1)} of the step on average"
    if found.is_settled:
        return f"{plans}. {chance} {gain}, so measuring on would hardly pay."
    return f"{plans}. {chance} {gain}. Give more --trials or a larger --budget to measure on."


def num_open(found: TuneResult) -> int:
    """The number of plans that were not measured and may run."""
    return sum(not one.why for one in found.left)


def unit_of(found: TuneResult) -> str:
    """The unit of speed. A model without a sequence dimension has samples."""
    return "tokens/s" if found.sequence > 1 else "samples/s"
