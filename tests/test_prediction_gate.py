"""The gate that keeps the errors of predictions, and the sets that it looks at."""

import json

import audiences
import prediction_gate

BEST = {"users": {"time median": 0.10, "time p90": 0.30}}


def test_an_error_may_grow_by_three_in_a_hundred() -> None:
    near = {"users": {"time median": 0.102, "time p90": 0.305, "time inside": 0.8}}
    assert prediction_gate.problems(near, BEST, {}) == []
    far = {"users": {"time median": 0.104, "time p90": 0.2, "time inside": 0.95}}
    assert [text.partition(" ")[0] for text in prediction_gate.problems(far, BEST, {})] == ["users:", "users:"]
    excused = {"users: time median": "why", "users: time inside": "why"}
    assert prediction_gate.problems(far, BEST, excused) == []


def test_a_better_error_is_never_replaced_by_a_worse_one() -> None:
    now = {"users": {"time median": 0.2, "time p90": 0.2, "time inside": 0.7}, "new": {"time median": 0.5}}
    made = prediction_gate.better(now, BEST)
    assert made == {"users": {"time median": 0.10, "time p90": 0.2, "time inside": 0.7}, "new": {"time median": 0.5}}


def test_every_exception_names_a_figure_and_a_reason() -> None:
    accepted = json.loads(prediction_gate.ACCEPTED.read_text())
    figures = {f"{name}: {figure}" for name, values in accepted["best"].items() for figure in values}
    assert set(accepted["exceptions"]) <= figures
    assert all(len(reason) > 20 for reason in accepted["exceptions"].values())


def test_sets_are_of_different_publishers() -> None:
    sets = audiences.audiences()
    looked_at = {one.row.source_key for name, rows in sets.items() if "held" not in name for one in rows}
    held = {one.row.source_key for name, rows in sets.items() if "held" in name for one in rows}
    assert len(held) >= 12 and not looked_at & held
