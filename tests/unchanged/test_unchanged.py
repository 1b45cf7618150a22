"""The net under a refactoring: plans, estimates, programs, collectives and losses are as they were recorded.

    python -m pytest -m "" tests/unchanged            compare
    RECORD=1 python -m pytest -m "" tests/unchanged   write the results down; with -k only those of some cases

Cases are the lines of `KIND.txt`, results those of `KIND.json`. UNCHANGED_CACHE=FOLDER keeps captures between runs.
No result has a time, a path or a version. Floating-point numbers may differ by rounding, but not in bytes of files.
"""

import hashlib
import json
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from kept_captures import FOLDER
from unchanged_cases import FLOAT32, HERE, cases, entries, num_ranks, planned, wish_of

from autopar.runtime.distributed.launch import Ranks

pytest.importorskip("transformers")
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
KINDS = ("plan", "estimate", "program", "run")
RECORDED = {kind: json.loads(p.read_text()) if (p := HERE / f"{kind}.json").exists() else {} for kind in KINDS}
NEW: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
IS_RECORDING = bool(os.environ.get("RECORD"))
WHOLE = cases("plan")[:3]  # plans whose text is recorded
SHORT = 48  # characters of a value that is recorded as it is; a longer one by its hash
ROUNDING, ROUNDING_32, ROUNDING_16 = 1e-9, 1e-4, 5e-3  # relative
NOTHING = 1e-12  # an absolute difference that is rounding too
PACKAGES = re.compile(r"/\S*/site-packages/")  # where a note names a line of a package
RUNS_OF_A_WORLD = 10  # then its process groups have too many threads


@pytest.fixture(scope="module", autouse=True)
def surroundings() -> Iterator[None]:
    """A folder with the files that commands name. Results that were recorded are written at the end."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for path in (HERE / "files").iterdir():
            Path(folder, path.name).write_bytes(path.read_bytes())
        patch.chdir(folder)
        patch.setenv("AUTOPAR_CACHE_DIR", os.environ.get("UNCHANGED_CACHE") or f"{folder}/cache")
        patch.setenv(FOLDER, folder)
        yield
    for kind in KINDS if IS_RECORDING else ():
        known = RECORDED[kind] | NEW[kind]
        lines = [f"{json.dumps(c)}: {json.dumps(known[c], separators=(',', ':'))}" for c in cases(kind) if c in known]
        (HERE / f"{kind}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], Ranks]]:
    """Worlds of ranks by size. A world ends after some runs."""
    found: dict[int, list[Any]] = {}

    def of_size(size: int) -> Ranks:
        world, runs = found.get(size, (None, 0))
        if runs == RUNS_OF_A_WORLD or (world is not None and not world.is_open):
            world.close()
            world, runs = None, 0
        if world is None:
            world = Ranks(size, timeout_s=100)
            world.run("kept_captures:keep", os.environ[FOLDER])  # these tests do not keep captures by themselves
        found[size] = [world, runs + 1]
        return found[size][0]

    yield of_size
    for world, _ in found.values():
        world.close()


@pytest.mark.parametrize("case", cases("plan"), ids=str)
def test_plan(case: str) -> None:
    Path("plan.json").unlink(missing_ok=True)
    shown = command("plan", case, "--out", "plan.json")
    value: dict[str, Any] = {"printed": brief(shown, 1)} if shown else {}
    if Path("plan.json").exists():
        text = re.sub(r'"torch_version": "[^"]*"', '"torch_version": ""', Path("plan.json").read_text())
        plan = json.loads(text)
        value |= {"file": plan if case in WHOLE else brief(plan, 3), "bytes": digest(text)}
    check("plan", case, value)


@pytest.mark.parametrize("case", cases("estimate"), ids=str)
def test_estimate(case: str) -> None:
    check("estimate", case, command("estimate", f"{case} --json"), ROUNDING)


@pytest.mark.parametrize("case", cases("program"), ids=str)
def test_program(case: str) -> None:
    """A model of the census, captured for any batch: its program at two batches, and its record."""
    from autopar.capture.any_size import capture
    from autopar.capture.request import Request

    warnings.filterwarnings("ignore")
    with torch.device("meta"):
        model, inputs, loss_fn = next(e for e in entries() if e.name == case).build()
    found = capture(Request.of(model.to("meta").train(), inputs, loss_fn))
    record = None if found.record is None else json.loads(PACKAGES.sub("", found.record.model_dump_json()))
    at = {str(batch): digest(found.at(batch=batch).fingerprint) for batch in ((4, 6) if record else (4,))}
    check("program", case, {"at": at, "record": brief(record, 2)})


@pytest.mark.parametrize("case", cases("run"), ids=str)
def test_run(case: str, worlds: Callable[[int], Ranks]) -> None:
    plan, (family, wish) = planned(case), wish_of(case)
    world = worlds(num_ranks(wish))
    ranks = world.run("unchanged_cases:trained", case, plan)
    sent: dict[str, Any] = {}
    for rank, result in enumerate(ranks):
        alike = next((names for names, counts in sent.items() if counts == result["sent"]), None)
        sent[str(rank) if alike is None else f"{alike} {rank}"] = result["sent"] if alike is None else sent.pop(alike)
    losses = {name: ranks[0][name] for name in ("loss", "norm")}
    tolerance = ROUNDING_16 if "precision" in wish else ROUNDING_32 if family in FLOAT32 else ROUNDING
    check("run", case, {**losses, "sent": sent}, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_all_cases_are_recorded(kind: str) -> None:
    assert IS_RECORDING or list(RECORDED[kind]) == cases(kind)


def command(name: str, words: str, *more: str) -> Any:
    """What a command prints as JSON, without times and paths. None if it prints text."""
    from run import autopar

    result = autopar(name, *words.split(), *more)
    assert result.exit_code in (0, 3), result.output  # 3: no plan fits
    if "--json" not in words:
        return None if result.exit_code == 0 else result.stderr
    shown = json.loads(result.stdout)
    shown.pop("seconds", None)
    shown["notes"] = [note for note in shown.get("notes", ()) if "kept as" not in note]
    return shown


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def brief(value: Any, depth: int) -> Any:
    """A value whose long parts are hashes; parts of dictionaries and lists to a depth stay apart."""
    text = json.dumps(value, sort_keys=True)
    if len(text) <= SHORT:
        return value
    if depth and isinstance(value, dict):
        return {key: brief(part, depth - 1) for key, part in value.items()}
    if depth and isinstance(value, list):
        return [brief(part, depth - 1) for part in value]
    return f"# {digest(text)}"


def check(kind: str, case: str, value: Any, tolerance: float = 0.0) -> None:
    """Compare a result with what was recorded, or record it."""
    value = json.loads(json.dumps(value))
    if IS_RECORDING:
        NEW[kind][case] = value
        return
    assert case in RECORDED[kind], f"nothing is recorded for {kind} {case!r}: RECORD=1 records it"
    found = list(differences(RECORDED[kind][case], value, tolerance))
    shown = "\n  ".join(found[:5] + ([f"and {len(found) - 5} more"] if len(found) > 5 else []))
    assert not found, f"{kind} {case!r} differs:\n  {shown}"


def differences(old: Any, new: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """The paths at which two values differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key, "nothing"), new.get(key, "nothing"), tolerance, f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differences(a, b, tolerance, f"{path}[{i}]")
    elif not (old == new or close(old, new, tolerance)):
        yield f"{path.lstrip('.')}: was {json.dumps(old)[:200]}, is {json.dumps(new)[:200]}"


def close(old: Any, new: Any, tolerance: float) -> bool:
    """Whether two floating-point numbers are equal but for rounding, or both are no numbers."""
    if not (isinstance(old, float) and isinstance(new, float)):
        return False
    return math.isclose(old, new, rel_tol=tolerance, abs_tol=NOTHING) or (math.isnan(old) and math.isnan(new))
