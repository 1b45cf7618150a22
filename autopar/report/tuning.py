"""The result of a measured search: read from data, in sentences, and as a page with a picture.

The picture has predicted against measured step times, and the believed times of plans that were not measured. Both axes
have the same logarithmic range. A failed trial has no time and lies on the lower edge.
"""

from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any

from markupsafe import Markup

from autopar.cost_model.machine.profile import DeviceProfile
from autopar.errors import InputError, Problem
from autopar.files.plain_data import content_of, read_plain
from autopar.ir.plan import Plan
from autopar.report.page_tools import render
from autopar.report.scatter import log_square
from autopar.report.svg import SIDE, Plot, dots, line
from autopar.report.words import degrees_in_words, step_sentence
from autopar.search.measured.belief import NOTABLE
from autopar.search.measured.result import KIND, VERSION, Left, PlanTrial, TuneResult
from autopar.search.measured.rounds import Spread
from autopar.search.measured.tuning import Candidate
from autopar.search.result.format import plan_in_words, step_in_words
from autopar.search.result.result import ON_FEWER_DEVICES, UNITS
from autopar.words.numbers import amount, capped, percent, readable_bytes, readable_seconds

_NOT_READ = ("step_s", "tokens_per_s", "profile")  # they follow from the rest, or only their name is written
_ABOVE_0 = "must be above 0"
_MOST_CHARS = 300  # of a message
_REASONS = {
    "oom": "out of memory",
    "error": "failed",
    "timeout": "ended as hanging",
    "killed": "a rank was killed",
    "interrupted": "interrupted",
}
_TERMS = {"compute": "computing", "in_host": "links inside a host", "inter_host": "links between hosts"}
_EDGE = 0.985 * SIDE  # where failed trials lie


# ---- read ----


def tuning_from(data: Any, source: str = "tuning result") -> TuneResult:
    """The inverse of `TuneResult.to_dict`, without the profile. The data has only the name of the profile."""
    content = content_of(data, KIND, VERSION, source, command="tune", again="tune again")
    problems: list[Problem] = []
    readers: Mapping[Any, Callable[[Any], Any]] = {
        Plan: lambda plan: Plan.from_dict(plan, f"{source}: plan"),
        DeviceProfile: lambda profile: profile,
    }
    given = {name: value for name, value in content.items() if name not in _NOT_READ}
    result: TuneResult | None = read_plain(TuneResult, given, problems, readers=readers)
    if result is not None and not problems:
        _check(result, problems)
    if result is None or problems:
        raise InputError(f"{source} cannot be used", problems)
    return result


def _check(result: TuneResult, problems: list[Problem]) -> None:
    """Add what types do not say: seconds are above 0, and degrees have words."""
    if result.best is not None and not (
        0 <= result.best < len(result.tried) and result.tried[result.best].outcome.is_measured
    ):
        problems.append(Problem(path="best", rule="must be the position of a measured trial", value=result.best))
    for at, trial in enumerate(result.tried):
        _check_candidate(trial.candidate, problems, f"tried[{at}].candidate")
        seconds = trial.outcome.seconds
        if seconds is not None and (seconds.low == 0) == isfinite(seconds.high):
            end = "low" if isfinite(seconds.high) else "high"
            problems.append(Problem(path=f"tried[{at}].outcome.seconds.{end}", rule="is required"))
        elif seconds is not None and not (seconds.median > 0 and 0 <= seconds.low <= seconds.median <= seconds.high):
            rule = "must have 0 < median, and low ≤ median ≤ high"
            problems.append(Problem(path=f"tried[{at}].outcome.seconds", rule=rule))
    for at, left in enumerate(result.left):
        _check_candidate(left.candidate, problems, f"left[{at}].candidate")
        if left.believed_s <= 0:
            problems.append(Problem(path=f"left[{at}].believed_s", rule=_ABOVE_0, value=left.believed_s))


def _check_candidate(plan: Candidate, problems: list[Problem], path: str) -> None:
    if plan.predicted_s <= 0:
        problems.append(Problem(path=f"{path}.predicted_s", rule=_ABOVE_0, value=plan.predicted_s))
    try:
        plan_in_words(plan.degrees), degrees_in_words(plan.degrees)
    except (KeyError, TypeError, ValueError, AttributeError):
        problems.append(Problem(path=f"{path}.degrees", rule="must be the degrees of a plan"))


# ---- sentences ----


def best_in_words(result: TuneResult) -> str:
    """The best plan in words, and its measured step. Empty if no trial ran."""
    if result.best is None or result.step_s is None or result.tokens_per_s is None:
        return ""
    best, spent = result.tried[result.best].candidate, ""
    if result.objective in ON_FEWER_DEVICES:
        spent = f" and {result.step_s * best.per_second:.3g} {UNITS[result.objective]}"
    devices = f"{best.num_devices:,} device{'s' * (best.num_devices != 1)}"
    rate = amount(result.tokens_per_s, step_in_words(result.global_batch, result.sequence)[1])
    return f"{step_sentence(result, best.degrees, devices, 'A measured step', result.step_s, spent)}, that is {rate}."


def gain_in_words(result: TuneResult) -> str:
    """The probable gain of measuring on, in sentences."""
    count = num_open(result)
    if not count:
        return "Every plan was tried or cannot run, so measuring on gains nothing."
    plans = f"{count:,} plan{'s were' if count > 1 else ' was'} not measured"
    if result.best is None:
        return f"No trial ran, so nothing is known of the gain. {plans}."
    which = "one of them" if count > 1 else "it"
    chance = f"With a chance of at most {percent(result.chance_left)} {which} is more than {percent(NOTABLE)} faster."
    gain = f"One more trial would save {percent(result.gain_left, 1)} of the step on average"
    if result.is_settled:
        return f"{plans}. {chance} {gain}, so measuring on would hardly pay."
    return f"{plans}. {chance} {gain}. Give more --trials or a larger --budget to measure on."


def num_open(result: TuneResult) -> int:
    """The number of plans that were not measured and may run."""
    return sum(not plan.why for plan in result.left)


# ---- the page ----


def tuning_report(result: TuneResult) -> str:
    """The page of a measured search."""
    best = None if result.best is None else result.tried[result.best]
    states = [trial.outcome.state for trial in result.tried]
    return render(
        "tuning.html.jinja",
        found=result,
        best=best,
        sentence=best_in_words(result),
        within="" if best is None or best.outcome.seconds is None else interval(best.outcome.seconds),
        unit=step_in_words(result.global_batch, result.sequence)[1],
        picture=tuning_scatter(result),
        trials=[_trial_row(result, at, trial) for at, trial in enumerate(result.tried)],
        states=states,
        failed=states.count("failed"),
        num_open=num_open(result),
        learnt=_learnt(result),
        left=[_left_row(left) for left in result.left],
        gain=gain_in_words(result),
        notable=percent(NOTABLE),
    )


def _trial_row(result: TuneResult, at: int, trial: PlanTrial) -> dict[str, Any]:
    seconds, peak, predicted = trial.outcome.seconds, trial.outcome.peak_bytes, trial.candidate.predicted_s
    measured = ("", "", "")
    if seconds is not None:
        ratio = f"{seconds.median / predicted:.2f}"
        measured = (readable_seconds(seconds.median), interval(seconds) or "too few steps", ratio)
    memory = (readable_bytes(trial.candidate.predicted_bytes), "" if peak is None else readable_bytes(peak))
    return {
        "number": trial.number + 1,
        "plan": plan_in_words(trial.candidate.degrees),
        "figures": (readable_seconds(predicted), *measured, *memory),
        "ending": "best" if at == result.best else _ending(trial),
    }


def _ending(trial: PlanTrial) -> str:
    """How a trial ended."""
    if trial.outcome.state == "complete":
        return "measured"
    if trial.outcome.state == "pruned":
        return f"ended after {trial.outcome.steps} steps: surely slower than the best plan"
    reason = _REASONS.get(trial.outcome.reason, trial.outcome.reason or "failed")
    first = (trial.outcome.message.strip().splitlines() or [""])[0]
    return f"{reason}: {capped(first, _MOST_CHARS)}" if first else reason


def _learnt(result: TuneResult) -> list[tuple[str, str]]:
    """The factor on each term. Empty if nothing was measured."""
    if result.best is None:
        return []
    return [
        (_TERMS.get(name, capped(name.replace("_", " "))), f"× {value:.2f}") for name, value in result.factors.items()
    ]


def _left_row(plan: Left) -> tuple[str, ...]:
    return (
        plan_in_words(plan.candidate.degrees),
        readable_seconds(plan.candidate.predicted_s),
        readable_seconds(plan.believed_s),
        readable_bytes(plan.candidate.predicted_bytes),
        "" if plan.why else percent(plan.chance),
        f"cannot run: {capped(plan.why, _MOST_CHARS)}" if plan.why else "",
    )


# ---- the picture ----


def tuning_scatter(tuned: TuneResult) -> Plot | None:
    """The picture. None if there is no plan."""
    values = _values(tuned)
    if not values:
        return None

    def traces(at: Callable[[float], float]) -> Iterator[Markup]:
        for left in tuned.left:
            place, says = (at(left.candidate.predicted_s), SIDE - at(left.believed_s)), _left_tip(left)
            yield dots([place], class_="left dot" if not left.why else "left out dot", data_t=says)
            yield dots([place], class_="hole dot", data_t=says)
        best = None if tuned.best is None else tuned.tried[tuned.best]
        for trial in (*(each for each in tuned.tried if each is not best), *([best] if best else [])):
            x, seconds, says = at(trial.candidate.predicted_s), trial.outcome.seconds, _trial_tip(trial)
            if seconds is None:
                yield dots([(x, _EDGE)], class_="failed dot", data_t=says)
                continue
            if _is_bounded(seconds):
                ends = [(x, SIDE - at(seconds.low)), (x, SIDE - at(seconds.high))]
                yield line(ends, class_="interval", data_t=says)
            name = "best dot" if trial is best else "pruned dot" if trial.outcome.state == "pruned" else "own dot"
            yield dots([(x, SIDE - at(seconds.median))], class_=name, data_t=says)

    return log_square(
        values,
        traces,
        x_title="predicted step time (logarithmic)",
        y_title="measured or believed step time (logarithmic)",
        says=f"predicted against measured step time of {len(tuned.tried)} plans that were tried, and the believed step "
        f"time of {len(tuned.left)} others",
    )


def interval(seconds: Spread) -> str:
    """The interval in words; empty if there were too few steps."""
    return f"{readable_seconds(seconds.low)} to {readable_seconds(seconds.high)}" if _is_bounded(seconds) else ""


def measured_in_words(seconds: Spread) -> str:
    """The median, and its interval if there were steps enough."""
    within = interval(seconds)
    return readable_seconds(seconds.median) + (f" ({within})" if within else "")


def _is_bounded(seconds: Spread) -> bool:
    return seconds.low > 0 and isfinite(seconds.high)


def _values(result: TuneResult) -> list[float]:
    """All seconds that the picture shows."""
    values = [seconds for left in result.left for seconds in (left.candidate.predicted_s, left.believed_s)]
    for trial in result.tried:
        values.append(trial.candidate.predicted_s)
        if (seconds := trial.outcome.seconds) is not None:
            values += [seconds.median, *((seconds.low, seconds.high) if _is_bounded(seconds) else ())]
    return values


def _trial_tip(trial: PlanTrial) -> str:
    outcome, what = trial.outcome, f"trial {trial.number + 1}: {plan_in_words(trial.candidate.degrees)}"
    predicted = f"predicted {readable_seconds(trial.candidate.predicted_s)}"
    if outcome.seconds is None:
        return f"{what}\n{predicted}, failed"
    slower = "\nsurely slower than the best plan" if outcome.state == "pruned" else ""
    return f"{what}\n{predicted}, measured {measured_in_words(outcome.seconds)}{slower}"


def _left_tip(plan: Left) -> str:
    times = f"predicted {readable_seconds(plan.candidate.predicted_s)}, believed {readable_seconds(plan.believed_s)}"
    return f"not measured: {plan_in_words(plan.candidate.degrees)}\n{times}{', cannot run' if plan.why else ''}"
