"""The page of a measured search: its parts, failed and pruned trials, that text stays text, and wrong files."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from parsed import Page, parsed

from autopar.errors import InputError
from autopar.report.tuning import best_in_words, gain_in_words, tuning_from, tuning_report
from autopar.report.write import read_source, write_report, write_trace
from autopar.search.measured.result import Left, PlanTrial, TuneResult
from autopar.search.measured.rounds import Spread
from autopar.search.measured.tuning import Candidate, Outcome

HOSTILE = "</script><img src=x onerror=alert(1)>' onmouseover='alert(1) {{ 7 * 7 }}"
OOM = "rank 1 failed: OutOfMemoryError: <b>CUDA</b> out of memory\nTraceback: second line"
ROOM = "a plan that is predicted to need no more memory ran out of memory"


def candidate(predicted_s: float, **degrees: Any) -> Candidate:
    return Candidate(
        degrees={"tp": 1, "pp": 1, "dp_shard": 8, "zero": 2, "micro_batch": 2, "micro_batches": 1, **degrees},
        predicted_s=predicted_s,
        predicted_bytes=30e9,
        terms={"compute": predicted_s * 0.8, "in_host": predicted_s * 0.1},
        num_devices=8,
    )


def ran(median: float, low: float, high: float, state: Any = "complete", steps: int = 10) -> Outcome:
    seconds = Spread(median=median, low=low, high=high)
    return Outcome(state=state, seconds=seconds, peak_bytes=28.4e9, steps=steps, building_s=5.0, whole_s=9.0)


def tuned() -> TuneResult:
    """Trials of every kind: without an interval, the best, slower ones, out of memory and with an error."""
    failed = Outcome(state="failed", reason="oom", message=OOM, whole_s=3.0)
    broken = Outcome(state="failed", reason="error", message="x" * 5000)
    outcomes = (
        (candidate(0.50, tp=2, dp_shard=4), ran(0.561, 0.0, inf, steps=3)),
        (candidate(0.52, zero=1), ran(0.5432, 0.5301, 0.5513)),
        (candidate(0.53, pp=2, dp_shard=4, schedule="1f1b"), ran(0.655, 0.648, 0.662, "pruned", 6)),
        (candidate(0.49, zero=0), failed),
        (candidate(0.60, tp=8, dp_shard=1), broken),
    )
    return TuneResult(
        model="llama3-8b",
        cluster="8xh100",
        objective="time",
        global_batch=16,
        sequence=4096,
        tried=tuple(PlanTrial(number=at, candidate=one, outcome=outcome) for at, (one, outcome) in enumerate(outcomes)),
        left=(
            Left(candidate=candidate(0.55, tp=4, dp_shard=2), believed_s=0.571, chance=0.21),
            Left(candidate=candidate(0.58, recompute="full"), believed_s=0.634, chance=0.043),
            Left(candidate=candidate(0.59, micro_batch=4), believed_s=0.65, chance=0.01, why=ROOM),
        ),
        best=1,
        is_settled=False,
        why="5 trials are done",
        chance_left=0.253,
        gain_left=0.0123,
        factors={"compute": 1.071, "in_host": 1.32, "rack_2": 1.0},
        seconds=93.0,
        notes=("every dropout is 0",),
    )


def no_run() -> TuneResult:
    """Every trial failed."""
    found = tuned()
    return replace(found, tried=found.tried[3:], best=None, factors={"compute": 1.0, "in_host": 1.0}, chance_left=1.0)


def page_of(found: TuneResult) -> Page:
    return parsed(tuning_report(found))


def drawn(page: Page) -> dict[str | None, int]:
    """The marks of the picture, counted by class."""
    classes = [attributes.get("class") for tag, attributes in page.tags if tag == "path"]
    return {name: classes.count(name) for name in dict.fromkeys(classes)}


def test_every_part_is_on_the_page() -> None:
    page = page_of(tuned())
    for part in (
        "dp 8 ZeRO-1, micro-batch 2 × 1",  # the best plan
        "llama3-8b runs fastest as data parallel 8 with ZeRO 1, micro-batch 2",
        "A measured step of 16 sequences of 4,096 tokens takes 543 ms, that is 121 k tokens/s",
        "not settled 5 trials are done",
        "5 of 8 2 failed; in 93 s",
        "measured; 95 % interval 530 ms to 551 ms; predicted 520 ms",
        "measured; predicted 30 GB",
        "one more trial would save 1.2 % on average; chance of at most 25 %",
        "Predicted against measured step time",
        "520 ms 543 ms 530 ms to 551 ms 1.04 30 GB 28.4 GB best",
        "computing × 1.07",
        "links inside a host × 1.32",
        "rack 2 × 1.00",
        "tp 4 × dp 2 ZeRO-2, micro-batch 2 × 1 550 ms 571 ms 30 GB 21 %",
        f"cannot run: {ROOM}",
        "2 plans were not measured. With a chance of at most 25 % one of them is more than 2 % faster. "
        "One more trial would save 1.2 % of the step on average.",
        "every dropout is 0",
    ):
        assert part in page.words


def test_the_picture_has_a_mark_for_every_plan() -> None:
    found = tuned()
    page = page_of(found)
    marks = drawn(page)
    assert {name: count for name, count in marks.items() if name not in ("grid", None)} == {
        "limit": 1,  # the diagonal
        "interval": 2,
        "best dot": 1,
        "own dot": 1,
        "pruned dot": 1,
        "failed dot": 2,
        "left dot": 2,
        "left out dot": 1,
        "hole dot": 3,
    }
    tips = [attributes["data-t"] or "" for _, attributes in page.tags if "data-t" in attributes]
    assert "trial 2: dp 8 ZeRO-1, micro-batch 2 × 1\npredicted 520 ms, measured 543 ms (530 ms to 551 ms)" in tips
    assert any("surely slower" in tip for tip in tips)
    for tag, attributes in page.tags:
        if tag == "path":
            assert re.fullmatch(r"(M|L|h)[\d.]+( [\d.]+)?([MLh][\d.]+( [\d.]+)?)*", attributes["d"] or ""), attributes
            places = [float(number) for number in re.findall(r"[\d.]+", attributes["d"] or "")]
            assert all(0 <= place <= 1000 for place in places)


def test_a_plan_as_predicted_lies_on_the_diagonal() -> None:
    found = tuned()
    exact = replace(found.tried[1], outcome=ran(0.52, 0.51, 0.53))
    page = page_of(replace(found, tried=(exact,), left=found.left[:2], best=0))
    best = next(attributes["d"] or "" for _, attributes in page.tags if attributes.get("class") == "best dot")
    x, y = (float(number) for number in re.findall(r"[\d.]+", best.removesuffix("h0")))
    assert x == pytest.approx(1000 - y, abs=0.2)


def test_failed_and_pruned_trials_are_shown() -> None:
    page = page_of(tuned())
    assert "ended after 6 steps: surely slower than the best plan" in page.words
    assert "out of memory: rank 1 failed: OutOfMemoryError: <b>CUDA</b> out of memory" in page.words
    assert "second line" not in page.words
    assert "failed: xxx" in page.words
    assert "x" * 400 not in page.words
    assert "too few steps" in page.words  # a trial without an interval
    assert not re.search(r"\b(nan|inf|None|Infinity|NaN)\b", page.words)


def test_a_result_without_any_run() -> None:
    page = page_of(no_run())
    assert "No plan ran" in page.words
    assert "2 trials failed" in page.words
    assert "nothing was learnt" in page.words
    assert "No trial ran, so nothing is known of the gain. 2 plans were not measured." in page.words
    assert drawn(page)["failed dot"] == 2
    empty = page_of(replace(no_run(), tried=(), left=()))
    assert "No trial was made" in empty.words


def test_what_measuring_on_gains() -> None:
    found = tuned()
    settled = replace(found, is_settled=True, chance_left=0.04, gain_left=0.0004)
    assert "would save < 0.1 % of the step on average, so measuring on would hardly pay." in gain_in_words(settled)
    assert "1 plan was not measured. With a chance of at most 25 % it is" in gain_in_words(
        replace(found, left=found.left[1:])
    )
    assert "measuring on gains nothing" in gain_in_words(replace(found, left=found.left[2:]))


def test_the_best_plan_in_words() -> None:
    found = tuned()
    assert best_in_words(found).startswith("On 8 devices llama3-8b runs fastest as ")
    assert best_in_words(no_run()) == ""
    at, seconds = found.best, found.step_s
    assert at is not None and seconds is not None
    tried = list(found.tried)
    tried[at] = replace(tried[at], candidate=replace(tried[at].candidate, per_second=2.0))
    cost = best_in_words(replace(found, objective="cost", tried=tuple(tried)))
    assert "costs least as" in cost and f"and {2 * seconds:.3g} USD, that is" in cost


def test_it_stands_alone_and_text_stays_text() -> None:
    found = tuned()
    harmless, page = page_of(found), page_of(hostile(found))
    shapes = [[(tag, tuple(sorted(attributes))) for tag, attributes in one.tags] for one in (harmless, page)]
    assert shapes[0] == shapes[1]
    assert HOSTILE in page.words
    assert page.scripts == harmless.scripts
    html = tuning_report(found)
    assert "<b>CUDA" not in html
    assert "url(" not in html and "@import" not in html
    for tag, attributes in page.tags:
        assert tag in ("meta", "link") or not {"src", "href", "action"} & set(attributes)


def hostile(found: TuneResult) -> TuneResult:
    """Every text that comes from outside, replaced."""
    outcome = Outcome(state="failed", reason="error", message=HOSTILE)
    pipeline = found.tried[2]
    degrees = {**pipeline.candidate.degrees, "schedule": HOSTILE}
    tried = (
        *found.tried[:2],
        replace(pipeline, candidate=replace(pipeline.candidate, degrees=degrees)),
        replace(found.tried[3], outcome=outcome),
        replace(found.tried[4], outcome=outcome),
    )
    left = (*found.left[:2], replace(found.left[2], why=HOSTILE))
    return replace(
        found, model=HOSTILE, cluster=HOSTILE, why=HOSTILE, notes=(HOSTILE,), tried=tried, left=left,
        factors={"compute": 1.0, "in_host": 1.0, HOSTILE: 1.0},
    )  # fmt: skip


def test_files(tmp_path: Path) -> None:
    result, page = tmp_path / "tuned.json", tmp_path / "page.html"
    for found in (tuned(), no_run()):
        result.write_text(json.dumps(found.to_dict()))
        read = read_source(result)
        assert read == found
        assert write_report(read, page) == page.stat().st_size > 5_000
        assert page.read_text() == tuning_report(found)
    with pytest.raises(InputError, match="no predicted time line"):
        write_trace(tuned(), tmp_path / "trace.json")


def removed(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.pop(name)


def changed(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        inner: Any = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed("recipe", "kind"), "is no tuning result"),
        (changed(99, "version"), "version 99, this autopar reads 1"),
        (changed(True, "version"), "version True"),
        (removed("version"), "version None"),
        (removed("model"), "model: is required"),
        (removed("tried"), "tried: is required"),
        (changed(1.0, "stepp"), "stepp: is not a known key"),
        (changed([1], "left"), r"left\[0\]: must be an object"),
        (changed({}, "tried", 1, "outcome"), r"tried\[1\].outcome.state: is required"),
        (changed("done", "tried", 1, "outcome", "state"), r"tried\[1\].outcome.state: must be one of complete, pruned"),
        (changed("bad", "tried", 3, "outcome", "reason"), r"tried\[3\].outcome.reason: must be one of oom, error"),
        (changed("fast", "tried", 1, "outcome", "seconds"), r"tried\[1\].outcome.seconds: must be an object"),
        (
            changed(-1.0, "tried", 0, "outcome", "seconds", "median"),
            r"tried\[0\].outcome.seconds: must have 0 < median",
        ),
        (changed({"median": 1.0, "low": 0.5}, "tried", 1, "outcome", "seconds"), r"seconds.high: is required"),
        (changed(0.0, "tried", 0, "candidate", "predicted_s"), r"tried\[0\].candidate.predicted_s: must be above 0"),
        (changed("x", "tried", 0, "candidate", "degrees", "tp"), r"tried\[0\].candidate.degrees: must be the degrees"),
        (changed({"pp": 2}, "left", 0, "candidate", "degrees"), r"left\[0\].candidate.degrees: must be the degrees"),
        (changed(0.0, "left", 1, "believed_s"), r"left\[1\].believed_s: must be above 0"),
        (changed(3, "best"), "best: must be the position of a measured trial; got 3"),
        (changed(9, "best"), "best: must be the position of a measured trial; got 9"),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[dict[str, Any]], None], says: str) -> None:
    data = json.loads(json.dumps(tuned().to_dict()))
    change(data)
    with pytest.raises(InputError, match=says) as caught:
        tuning_from(data, "tuned.json")
    assert str(caught.value).startswith("tuned.json")
