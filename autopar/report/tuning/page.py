"""The result of a measured search as a page: trials, corrections of the prediction, and plans without a trial."""

from dataclasses import dataclass

from autopar._version import __version__
from autopar.report.numbers import capped, percent, readable_bytes, readable_seconds
from autopar.report.page_tools import environment, script_json
from autopar.report.tuning.scatter import interval, tuning_scatter
from autopar.report.tuning.words import best_in_words, gain_in_words, num_open, unit_of
from autopar.search.measured.belief import NOTABLE
from autopar.search.measured.result import Left, Tried, TuneResult
from autopar.search.result.format import plan_in_words

MOST_CHARS = 300  # of a message
_REASONS = {
    "oom": "out of memory",
    "error": "failed",
    "timeout": "ended as hanging",
    "killed": "a rank was killed",
    "interrupted": "interrupted",
}
_TERMS = {"compute": "computing", "in_host": "links inside a host", "inter_host": "links between hosts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A trial in the table."""

    number: int
    plan: str
    figures: tuple[str, ...]
    ending: str


def tuning_report(found: TuneResult) -> str:
    """The page of a measured search."""
    best = None if found.best is None else found.tried[found.best]
    states = [one.outcome.state for one in found.tried]
    return (
        environment()
        .get_template("tuning.html.jinja")
        .render(
            found=found,
            best=best,
            sentence=best_in_words(found),
            within="" if best is None or best.outcome.seconds is None else interval(best.outcome.seconds),
            unit=unit_of(found),
            picture=tuning_scatter(found),
            trials=[_trial_row(found, at, one) for at, one in enumerate(found.tried)],
            states=states,
            failed=states.count("failed"),
            num_open=num_open(found),
            learnt=_learnt(found),
            left=[_left_row(one) for one in found.left],
            gain=gain_in_words(found),
            notable=percent(NOTABLE),
            data=script_json({}),
            version=__version__,
        )
    )


def _trial_row(found: TuneResult, at: int, one: Tried) -> _Row:
    seconds, peak, predicted = one.outcome.seconds, one.outcome.peak_bytes, one.candidate.predicted_s
    return _Row(
        number=one.number + 1,
        plan=plan_in_words(one.candidate.degrees),
        figures=(
            readable_seconds(predicted),
            "" if seconds is None else readable_seconds(seconds.median),
            "" if seconds is None else interval(seconds) or "too few steps",
            "" if seconds is None else f"{seconds.median / predicted:.2f}",
            readable_bytes(one.candidate.needed_bytes),
            "" if peak is None else readable_bytes(peak),
        ),
        ending="best" if at == found.best else _ending(one),
    )


def _ending(one: Tried) -> str:
    """How a trial ended."""
    if one.outcome.state == "complete":
        return "measured"
    if one.outcome.state == "pruned":
        return f"ended after {one.outcome.steps} steps: surely slower than the best plan"
    reason = _REASONS.get(one.outcome.reason, one.outcome.reason or "failed")
    first = (one.outcome.message.strip().splitlines() or [""])[0]
    return f"{reason}: {capped(first, MOST_CHARS)}" if first else reason


def _learnt(found: TuneResult) -> list[tuple[str, str]]:
    """The factor on each term. Empty if nothing was measured."""
    if found.best is None:
        return []
    return [
        (_TERMS.get(name, capped(name.replace("_", " "))), f"× {value:.2f}") for name, value in found.factors.items()
    ]


def _left_row(one: Left) -> tuple[str, ...]:
    return (
        plan_in_words(one.candidate.degrees),
        readable_seconds(one.candidate.predicted_s),
        readable_seconds(one.believed_s),
        readable_bytes(one.candidate.needed_bytes),
        "" if one.why else percent(one.chance),
        f"cannot run: {capped(one.why, MOST_CHARS)}" if one.why else "",
    )
