"""A damaged file is one error that names it, with exit status 2. A damaged file of the cache is made anew."""

import io
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import optuna
import pytest
from damaged import damaged
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from ruamel.yaml import YAML
from run import autopar
from suites import long
from typer import Typer
from typer.testing import CliRunner
from written_runs import end, line, start, write

from autopar.cache.store import KeptFile
from autopar.cli.app import app_of
from autopar.cost_model.fit.profile_parts import measured_parts, read_trace
from autopar.cost_model.machine.profile_io import load_profile
from autopar.errors import AutoparError
from autopar.files.strict_text import values_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.explanation import Prediction
from autopar.runs.record import METRICS_FILE, RUN_FILE
from autopar.search.driver.study import RESULT, study_place
from autopar.search.measured.result import Left, PlanTrial, TuneResult
from autopar.search.measured.rounds import Spread
from autopar.search.measured.study import TrialStudy
from autopar.search.measured.tuning import Candidate, Outcome
from autopar.search.result.result import SearchResult

EXAMPLES = Path(__file__).parent.parent / "report" / "examples"
ROOT = Path(__file__).parents[2]
RUNS = ROOT / "benchmarks" / "data" / "published_runs.csv"
PREDICTED = Prediction(
    step_s=2.0, step_interval_s=(1.5, 3.0), samples_per_s=4.0, tokens_per_s=1000.0, mfu=0.4, peak_bytes=7e9,
    peak_interval_bytes=(6e9, 9e9), device_bytes=80e9,
)  # fmt: skip
PLAN = Candidate(
    degrees={"tp": 2, "zero": 3, "micro_batch": 1, "cuts": [1]}, predicted_s=1.0, predicted_bytes=1e9,
    terms={"compute": 1.0}, num_devices=4,
)  # fmt: skip
DONE = Outcome(state="complete", seconds=Spread(median=2.0, low=1.5, high=2.5), peak_bytes=3e9, steps=10)


@cache
def app(command: str) -> Typer:
    return app_of([command])


def check(file: Path, name: str, *command: str) -> None:
    result = CliRunner().invoke(app(command[0]), list(command))
    said = f"{name}: {result.stderr[-1000:]} {result.exception!r}"
    assert result.exit_code in (0, 2), said
    assert "Traceback" not in result.output and "this is a bug" not in result.output, said
    assert result.exit_code == 0 or file.name in result.stderr, said


def stored(name: str) -> Any:
    """A search whose candidates are few."""
    data = json.loads((EXAMPLES / f"{name}.json").read_text())
    if data["points"] is not None:
        data["points"]["columns"] = {key: values[:3] for key, values in data["points"]["columns"].items()}
    return data


def tuned() -> Any:
    return TuneResult(
        model="m", cluster="4xcpu", objective="time", global_batch=4, sequence=8,
        tried=(PlanTrial(number=0, candidate=PLAN, outcome=DONE),),
        left=(Left(candidate=PLAN, believed_s=1.0, chance=0.5),), best=0, is_settled=False, why="w", chance_left=0.5,
        gain_left=0.1, factors={"compute": 1.0}, seconds=1.0, notes=("n",),
    ).to_dict()  # fmt: skip


DOCUMENTS: dict[str, tuple[Callable[[], Any], int]] = {  # with the distance of the damages that are tried
    "search": (lambda: stored("pipeline"), 97),
    "search without a plan": (lambda: stored("misfit"), 5),
    "measured search": (tuned, 5),
    "plan": (lambda: stored("flat")["plan"], 11),
}


@pytest.mark.parametrize("fewer", (3, long(1)))
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_documents(kind: str, fewer: int, tmp_path: Path) -> None:
    make, distance = DOCUMENTS[kind]
    file = tmp_path / "it.json"
    for name, text in list(damaged(make()))[:: fewer * distance]:
        file.write_text(text)
        check(file, name, "report", str(file), "--out", str(tmp_path / "page.html"))


def test_run_directories(tmp_path: Path) -> None:
    lines = [line(s, 4.0 - s, step_s=1.0, tokens_per_s=2.0, tokens=64, peak_bytes=3, extra={"a": 1.0}) for s in (0, 1)]
    run = write(tmp_path / "run", [start(), *lines, end()], total_steps=9, predicted=PREDICTED, device_type="cuda")
    about, metrics = (run / RUN_FILE).read_text(), (run / METRICS_FILE).read_text().splitlines()
    commands = (("status", str(run)), ("report", str(run), "--out", str(tmp_path / "page.html")))
    for command in commands:
        for name, text in list(damaged(json.loads(about)))[::2]:
            (run / RUN_FILE).write_text(text)
            check(run, name, *command)
        (run / RUN_FILE).write_text(about)
        for at in range(len(metrics)):
            for name, text in list(damaged(json.loads(metrics[at])))[at::4]:
                (run / METRICS_FILE).write_text("\n".join([*metrics[:at], text, *metrics[at + 1 :]]) + "\n")
                check(run, name, *command)
        (run / METRICS_FILE).write_text("\n".join(metrics) + "\n")


def _damaged_lines(file: Path) -> Iterator[str]:
    """Names of damages to a journal, each written to the file."""
    lines = file.read_text().splitlines()
    for at, text in enumerate(lines):
        for name, other in list(damaged(json.loads(text), 2))[at % 7 :: 7]:
            file.write_text("\n".join([*lines[:at], other, *lines[at + 1 :]]) + "\n")
            yield f"line {at}: {name}"


def test_studies_with_a_result(tmp_path: Path) -> None:
    file = tmp_path / "plan.log"
    study_place(file, {}).keep(RESULT, json.dumps(stored("misfit")))
    for name in list(_damaged_lines(file)):
        check(file, name, "report", str(file), "--out", str(tmp_path / "page.html"))


def test_studies_of_measured_plans(tmp_path: Path) -> None:
    file = tmp_path / "tune.log"

    def opened() -> TrialStudy:
        return TrialStudy([PLAN], study_place(file, {"model": "m"}), objective="time", tokens=8)

    first = opened()
    claim = first.claim(0, within_s=60)
    assert claim is not None
    first.finish(claim, DONE)
    for name in _damaged_lines(file):
        refused(opened, file, name)


def refused(read: Callable[[], object], file: Path, name: str) -> None:
    try:
        read()
    except AutoparError as error:
        assert file.name in str(error), name


def test_a_damaged_piece_of_a_result(tmp_path: Path) -> None:
    """The text of a result is JSON in JSON."""
    file = tmp_path / "plan.log"
    data = stored("misfit")
    for name, text in list(damaged(data))[::40]:
        file.unlink(missing_ok=True)
        study_place(file, {}).keep(RESULT, text)
        check(file, name, "report", str(file), "--out", str(tmp_path / "page.html"))


LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "bos_token_id": 1,
}  # fmt: skip
WRONG_FIELDS: list[dict[str, Any]] = [
    {"architectures": {"a": 1}}, {"architectures": [1.5]}, {"bos_token_id": [1]}, {"hidden_size": [32]},
    {"model_type": 1}, {"rms_norm_eps": -1e-6}, {"rms_norm_eps": 1e7}, {"rope_parameters": {"rope_theta": -1e4}},
    {"rope_parameters": {"rope_theta": [1e4]}}, {"max_position_embeddings": -64}, {"pretraining_tp": 10**30},
    {"rope_parameters": -1},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_FIELDS, ids=str)
def test_a_config_is_named_with_the_field(wrong: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | wrong))
    result = autopar("estimate", str(tmp_path), "-c", "2xcpu", "--tp", "2", "--seq-len", "8")
    assert result.exit_code == 2 and str(tmp_path / "config.json") in result.stderr, result.output
    assert next(iter(wrong)) in result.stderr
    assert not any(word in result.stderr for word in ("this is a bug", "<class", "NoneType", "Errors:"))


@pytest.fixture(scope="module")
def gpt2_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    small = ("--layers", "1", "--hidden", "48", "--seq-len", "8", "--global-batch", "4")
    assert autopar("plan", "gpt2", "-c", "2xcpu", "--tp", "2", *small, "--out", str(path)).exit_code == 0
    return path


@pytest.mark.parametrize("change", ["short label", long("short type"), "number for a type", long("unknown label")])
def test_a_plan_file_is_named_where_it_is_used(change: str, gpt2_plan: Path, tmp_path: Path) -> None:
    data, file = json.loads(gpt2_plan.read_text()), tmp_path / "damaged.json"
    block = data["blocks"][-1]
    ports, labels = next(iter(block["ports"].values())), next(iter(block["labels"].values()))
    if change == "short label":
        labels.clear()
    elif change == "unknown label":
        labels[0] = "of nobody"
    else:
        ports[0:1] = [] if change == "short type" else [3]
    file.write_text(json.dumps(data))
    for command in (("estimate", str(file), "-c", "2xcpu"), ("verify", "gpt2", "-n", "2", "--plan", str(file))):
        result = autopar(*command, "--layers", "1", "--hidden", "48")
        assert result.exit_code == 2 and "damaged.json" in result.stderr, result.output
        assert "autopar plan" in result.stderr and "startswith" not in result.stderr


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("best", "degrees", "micro_batch"), [1]),
        (("best", "degrees", "zero"), 2.5),
        (("best", "num_devices"), -4),
        (("points", "columns", "seconds", 0), "x"),
        (("points", "columns", "bytes"), [1.0]),
    ],
    ids=str,
)
def test_values_of_a_search_that_mean_nothing(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    data, file = stored("flat"), tmp_path / "it.json"
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    file.write_text(json.dumps(data))
    result = autopar("report", str(file), "--out", str(tmp_path / "page.html"))
    assert result.exit_code == 2 and "it.json cannot be used" in result.stderr
    assert path[-1 if isinstance(path[-1], str) else -2] in result.stderr


@pytest.mark.parametrize("line", [0, 3, 9])
def test_the_damaged_line_of_a_journal_is_named(line: int, tmp_path: Path) -> None:
    file = tmp_path / "plan.log"
    study_place(file, {}).keep(RESULT, "x" * 300_000)
    lines = file.read_text().splitlines()
    other = json.dumps(json.loads(lines[line]) | {"op_code": "x"})
    for text in (b"{}", b"[3]", b"not JSON", other.encode(), lines[line].encode("utf-16")):
        before, after = ("".join(f"{one}\n" for one in some).encode() for some in (lines[:line], lines[line + 1 :]))
        file.write_bytes(before + text + b"\n" + after)
        result = autopar("report", str(file), "--out", str(tmp_path / "page.html"))
        assert result.exit_code == 2 and "Error" not in result.stderr, result.output
        assert line == 0 or f"plan.log is damaged: line {line + 1} " in result.stderr, result.stderr


@pytest.mark.parametrize("text", ["", "of another program"])
def test_a_report_changes_no_study(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.log"
    file.touch()
    if text:
        optuna.create_study(storage=JournalStorage(JournalFileBackend(str(file))), study_name=text)
    before = file.read_bytes()
    result = autopar("report", str(file), "--out", str(tmp_path / "page.html"))
    assert result.exit_code == 2 and "--study" in result.stderr and "created" not in result.stderr
    assert file.read_bytes() == before


def test_traces(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    slices = [
        {"ph": "X", "pid": 0, "cat": cat, "ts": at, "dur": 5.0, "name": "n", "args": {"call": 1}}
        for at, cat in ((0.0, "compute"), (5.0, "tp"), (10.0, "point-to-point"))
    ]
    for name, text in damaged({"traceEvents": slices, "otherData": {"degrees": {"tp": 2}}}, 8):
        file.write_text(text)

        def read() -> None:
            with values_of(file, "trace again"):
                measured_parts(read_trace(file))

        refused(read, file, name)


@pytest.mark.parametrize("fewer", (3, long(1)))
def test_clusters_and_profiles(fewer: int, tmp_path: Path) -> None:
    target, writer = tmp_path / "it.yaml", YAML(typ="safe", pure=True)
    cluster = {"name": "mine", "groups": [{"num_hosts": 2, "devices_per_host": 8, "device": "a100-80gb"}]}
    profile = writer.load(next(ROOT.glob("**/profiles/cpu.yaml")).read_text())
    for data, read in ((cluster, lambda: ClusterSpec.parse(str(target))), (profile, lambda: load_profile(target))):
        plain = json.loads(json.dumps(data, default=str))
        for name, text in list(damaged(plain, 2))[:: fewer * (1 if data is cluster else 17)]:
            try:
                out = io.StringIO()
                writer.dump(json.loads(text), out)
                target.write_text(out.getvalue())
            except (ValueError, RecursionError):
                target.write_text(text)
            refused(read, target, name)


def test_published_runs(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    head, row, *_ = RUNS.read_text().splitlines()
    cells = row.split(",")
    values = ("", "x", "-1", "9" * 400, "1e308", "nan", "inf", '"', "2.5")
    for at in range(0, len(cells), 2):
        changed = [*cells[:at], values[at % len(values)], *cells[at + 1 :]]
        file.write_text("\n".join([head, row, ",".join(changed)]) + "\n")
        check(file, f"column {at}", "validate", str(file))
        if at % 9 == 0:
            file.write_text("\n".join([",".join(changed), row]) + "\n")
            check(file, f"head {at}", "validate", str(file))
    for text in ("", head, head[:50], f"{head}\n{row[:40]}", '"' + head, f"{head}\n{row},more", "\x00", "é"):
        file.write_text(text)
        check(file, text[:20], "validate", str(file))


def test_the_cache_is_made_anew(tmp_path: Path) -> None:
    file, notes = KeptFile(path=tmp_path / "it.json", what="search"), list[str]()

    def parse(path: Path) -> SearchResult:
        return SearchResult.from_dict(json.loads(path.read_text()), str(path))

    for name, text in list(damaged(stored("misfit")))[::7]:
        file.path.write_text(text)
        count = len(notes)
        assert (file.read(parse, notes.append) is None) == (len(notes) > count), name
    assert notes


def test_the_sound_files_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    for make, _ in DOCUMENTS.values():
        file.write_text(json.dumps(make()))
        assert autopar("report", str(file), "--out", str(tmp_path / "page.html")).exit_code == 0
