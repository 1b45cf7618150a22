"""A folder of tests that takes more CPU seconds than its limit is named, by the time of this machine's cores."""

from collections import Counter

import cpu_seconds
import pytest


@pytest.mark.parametrize(
    ("loop_s", "seconds", "past"),
    (
        (0.02, {"ir": 12.9, "search": 25.8}, []),
        (0.02, {"ir": 13.1, "search": 13.0}, ["ir"]),
        (0.01, {"ir": 13.1}, ["ir"]),  # a faster machine has no fewer seconds
        (0.04, {"ir": 13.1}, []),
        (0.02, {"ir": 12.0, "search": 26.0, "cli": 2.0}, ["search", "cli", "all"]),  # `cli` has no limit yet
    ),
)
def test_a_folder_past_its_limit_is_named(
    loop_s: float, seconds: dict[str, float], past: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    limits = f"{tmp_path}/limits.json"
    with open(limits, "w") as file:
        file.write('{"loop": 0.02, "ir": 10, "search": 19.9, "all": 30}')
    monkeypatch.setattr(cpu_seconds, "LIMITS", cpu_seconds.Path(limits))
    monkeypatch.setattr(cpu_seconds, "loop_seconds", lambda: loop_s)
    assert cpu_seconds.past_limits(Counter(seconds)) == past


def test_processes_below_this_one_are_counted() -> None:
    before = cpu_seconds.tree_seconds()
    assert before >= cpu_seconds.os.times().user > 0
