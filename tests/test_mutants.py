"""The planted faults of tools/mutants.toml can be planted, and the tool changes no file of the checkout."""

from dataclasses import replace
from pathlib import Path

import pytest
from script import ROOT, script

mutants = script("tools/mutants.py")


def test_every_fault_can_be_planted() -> None:
    faults = mutants.read_faults()
    assert mutants.problems(faults) == []
    assert len(faults) >= 60
    assert {"conversions", "rules", "schedules", "caches", "files", "capture", "checkpoint"} <= {f.area for f in faults}


def test_an_old_text_that_is_not_there_once_is_refused() -> None:
    fault = mutants.read_faults()[0]
    with pytest.raises(mutants.FaultError, match="has the old text 2 times, not once"):
        fault.planted(fault.old * 2)
    gone = replace(fault, old="no such text")
    assert mutants.problems([gone]) == [f"{gone.name}: {gone.file} has the old text 0 times, not once: 'no such text'"]
    same = replace(fault, new=fault.old)
    assert mutants.problems([same, same]) == [
        f"{same.name}: there are two faults of this name",
        *[f"{same.name}: nothing changes"] * 2,
    ]


def test_the_nearest_test_file_is_the_first() -> None:
    fault = next(f for f in mutants.read_faults() if f.file == "search/bounds/uniform_partition.py")
    files = mutants.nearest_tests(fault)
    assert files[0] == "tests/search/bounds/test_uniform_partition.py"
    every = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(files) == every - {"tests/test_mutants.py"}  # it would notice every fault


def test_the_test_that_caught_a_fault_runs_first_while_it_exists(tmp_path: Path) -> None:
    every = mutants.read_faults()
    (fault,) = (each for each in every if each.name == "softmax-split")
    assert mutants.last_caught_by(fault) == ["tests/rules/test_rule_proof.py::test_rule_holds_in_shards"]
    assert mutants.last_caught_by(fault, tmp_path) == mutants.last_caught_by(replace(fault, what="another")) == []
    assert sum(bool(mutants.last_caught_by(each)) for each in every) >= 60


def test_a_fault_is_planted_into_a_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault = mutants.read_faults()[0]
    before = (ROOT / fault.file).read_text()
    met: list[str] = []

    def failing(tree: Path, tests: list[str], selected: str, left_out: list[str]) -> str:
        found = (tree / fault.file).read_text()
        met.append(found)
        assert (ROOT / fault.file).read_text() == before
        return "tests/test_some.py::test_it" if found != before and selected == "long" else ""

    monkeypatch.setattr(mutants, "_failing", failing)
    found = mutants.Bench(tmp_path).result(fault)
    assert (found.short, found.long) == ("", "tests/test_some.py::test_it")
    assert met == [fault.planted(before)] * 6 + [before]  # five runs of the short suite, the long tests, and the proof
    assert (tmp_path / "mutant" / fault.file).read_text() == before
