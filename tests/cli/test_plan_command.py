"""`autopar plan`: its output and files, and the options that it refuses for a model."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from run import autopar, json_of, refused
from suites import long

from autopar.cost_model.interval import usable_bytes
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan

pytest.importorskip("transformers")
SMALL = ("--layers", "2", "--hidden", "64", "--seq-len", "32")
HERE = Path(__file__).parent


@pytest.fixture
def in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def test_plan_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    wish = ("--tp", "2", "--dp", "2", "--zero", "3")
    shown = autopar("plan", "llama3-8b", "-c", "4xcpu", *wish, "--out", str(path), *SMALL)
    assert shown.exit_code == 0, shown.stderr
    found = Plan.load(path)
    assert (found.degrees.tp, found.degrees.dp_shard, found.degrees.zero) == (2, 2, 3)
    assert Plan.from_dict(json.loads(found.to_json())) == found
    assert "4 devices, fp32: the best of" in shown.stdout.splitlines()[0]
    for words in ("tp 2 × dp_shard 2 = 4 ranks, ZeRO-3", "vocabulary-parallel", "column-parallel", "row-parallel"):
        assert words in shown.stdout
        assert words in found.explain()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert autopar("plan", "gpt2", "-c", "4xcpu", "--tp", "2", "--out", str(tmp_path / name), *SMALL).exit_code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_json_and_derived_sizes() -> None:
    sizes = ("--global-batch", "16", "--micro-batch", "2", "--accumulate", "4")
    found = json_of("plan", "gpt2", "-c", "4xcpu", "--tp", "2", *sizes, *SMALL)
    plan = Plan.from_dict(found["plan"])
    assert (plan.degrees.accumulate, plan.degrees.dp, plan.batch, plan.sequence) == (4, 2, 4, 32)
    assert found["best"]["degrees"]["accumulate"] == 4
    assert (found["global_batch"], found["num_devices"], found["precision"]) == (16, 4, "fp32")


def test_a_sequence_that_cannot_be_cut_is_named(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    asked = ("--tp", "4", "--seq-len", "30", "--sequence-parallel")
    message = refused("plan", "gpt2", "-c", "4xcpu", "--layers", "2", "--out", str(out), *asked)
    assert all(words in message for words in ("sequence length 30", "degrees 3 and 5")), message
    assert not out.exists()


def test_heads_that_do_not_divide_are_noted_with_better_degrees(tmp_path: Path) -> None:
    asked = ("--tp", "7", "--dp", "1", "--seq-len", "32", "--out", str(tmp_path / "plan.json"))
    shown = autopar("plan", "gpt2", "-c", "7xcpu", "--layers", "2", *asked)
    assert shown.exit_code == 0, shown.stderr
    assert "7 does not divide 12 heads; nearest legal degrees 6 and 12" in " ".join(shown.stdout.split())


def test_where_nothing_fits_the_closest_plan_is_named() -> None:
    asked = ("plan", "llama3-8b", "-c", "2xcpu", "--tp", "2", "--layers", "4", "--seq-len", "64")
    message = refused(*asked, status=3)
    said = ("no plan fits", "a device that has 8 GB", "a plan must fit with 90% (--chance)", "are missing", "devices")
    assert all(words in message for words in said)
    shown = autopar(*asked, "--json")
    data = json.loads(shown.stdout)
    assert (shown.exit_code, data["plan"]) == (3, None)
    assert data["closest"]["missing_bytes"] > 0


def test_remedies_of_a_plan_that_does_not_fit_run(tmp_path: Path) -> None:
    """Each option that the message names makes a plan fit in place of what was asked for."""
    spec = ClusterSpec.preset("8xrtx4090")
    group = spec.groups[0]  # with 26.6 GB for a plan
    memory = int(1.056 * group.device.memory_bytes / usable_bytes(1.0))
    larger = replace(group, device=replace(group.device, memory_bytes=memory))
    replace(spec, groups=(larger,)).dump(tmp_path / "cluster.yaml")
    model = ("plan", "llama3-8b", "-c", str(tmp_path / "cluster.yaml"), "--seq-len", "7168", "--global-batch", "8")
    asked = {"--loss-chunks": "1", "--recompute": "none", "--offload": "none"}
    message = refused(*model, *(word for pair in asked.items() for word in pair), status=3)
    remedies = dict(re.findall(r"with (--[a-z-]+) (\S+?):? ", message.partition("What would help: ")[2]))
    assert remedies.keys() >= {"--loss-chunks", "--recompute", "--offload"}, message
    for option, value in remedies.items():
        words = [word for pair in (asked | {option: value}).items() for word in pair]
        shown = autopar(*model, *words)
        assert shown.exit_code == 0, (option, value, shown.stderr)


def test_the_least_memory_is_told_in_bytes() -> None:
    shown = autopar("plan", "gpt2", "-c", "4xcpu", "--objective", "memory", "--fix", "pp=1", "--top", "1", *SMALL)
    assert shown.exit_code == 0, shown.stderr
    value = next(line for line in shown.stdout.splitlines() if line.strip().startswith("memory "))
    assert value.split()[-1] in ("kB", "MB", "GB")
    assert "no candidate is better" in shown.stdout


@pytest.mark.parametrize("dispatch", (long("exchange"), "gather"))
def test_a_fixed_expert_degree_is_that_of_the_plan(dispatch: str) -> None:
    fixed = ("--ep", "2", "--dispatch", dispatch, "--global-batch", "8")
    shown = autopar("plan", "mixtral-8x7b", "-c", "4xh100", *fixed, *SMALL)
    assert shown.exit_code == 0, shown.stderr
    assert "(ep 2)" in shown.stdout
    degrees = json_of("plan", "mixtral-8x7b", "-c", "4xh100", *fixed, *SMALL)["plan"]["degrees"]
    assert (degrees["ep"], degrees["dispatch"]) == (2, dispatch)


def test_an_expert_degree_of_a_dense_model_is_refused() -> None:
    shown = autopar("plan", "gpt2", "-c", "4xh100", "--ep", "2", "--global-batch", "8", *SMALL)
    assert shown.exit_code == 2
    assert "ep" in shown.stderr


def test_what_comes_next_says_why_it_loses() -> None:
    shown = autopar("plan", "gpt2", "-c", "4xcpu", "--forbid", "zero=0", "--top", "2", "--global-batch", "8", *SMALL)
    assert shown.exit_code == 0, shown.stderr
    _, _, rest = shown.stdout.partition("Next plans")
    next_ones = [line for line in rest.partition("Candidates that were ruled out")[0].splitlines() if "ZeRO-" in line]
    assert len(next_ones) >= 2
    assert all(line.strip().startswith("+") for line in next_ones)
    assert "ZeRO-0" not in rest.partition("How parameters")[0]
    assert " more" in rest


def test_a_search_can_be_narrowed(tmp_path: Path) -> None:
    found = json_of("plan", "gpt2", "-c", "4xcpu", "--fix", "tp=1,2", "--fix", "zero=3", "--forbid", "dp=4", *SMALL)
    assert found["plan"]["degrees"]["dp_shard"] != 4
    assert found["plan"]["degrees"]["zero"] == 3
    assert found["is_proven"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--fix", "tpp=2"), "did you mean 'tp'?"),
        (("--fix", "tp"), "must be word=value, such as tp=8"),
        (("--fix", "tp=2", "--fix", "tp=4"), "names tp a second time"),
        (("--tp", "2", "--fix", "tp=4"), "--tp and --fix tp=... both fix tp"),
        (("--forbid", "zero=9"), "must be 0, 1, 2 or 3"),
        (("--pp", "2", "--accumulate", "2"), "give --micro-batches"),
        (("--trials", "-1"), "trials: must be a whole number of at least 0"),
        (("--timeout", "nan"), "timeout_s: must be a number of seconds"),
        (("--precision", "bf17"), "did you mean 'bf16'?"),
        (("--profile", "no_such.json"), "no_such.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_search_that_cannot_be_narrowed_like_this(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused("plan", "gpt2", "-c", "4xcpu", *arguments)


def test_without_a_legal_plan_the_degree_that_forbids_it_is_named() -> None:
    message = refused("plan", "gpt2", "-c", "4xcpu", "--tp", "2", "--dp", "2", "--global-batch", "7", *SMALL)
    assert "dp 2 needs a multiple of 2 sequences" in message


def test_unwritable_target() -> None:
    message = refused("plan", "gpt2", "-c", "2xcpu", "--out", "/nonexistent/plan.json", *SMALL)
    assert "/nonexistent/plan.json cannot be written" in message


@pytest.mark.usefixtures("in_this_folder")
def test_model_that_does_not_export_names_module_and_line() -> None:
    message = refused("plan", "cli_models:branching", "-c", "2xcpu")
    source = (HERE / "cli_models.py").read_text().splitlines()
    line = next(n for n, text in enumerate(source, 1) if "the line that must be named" in text)
    assert "Branching" in message
    assert f"cli_models.py:{line}" in message


@pytest.mark.usefixtures("in_this_folder")
def test_operators_without_rule_come_before_the_split() -> None:
    shown = autopar("plan", "cli_models:plain", "-c", "2xcpu", "--tp", "2", "--global-batch", "4").stdout
    plan = shown.partition("Plan for cli_models:plain, computing in the dtype of the model")[2]
    first = plan.partition("Operators without a rule: computed whole on every rank")[2].partition("How parameters")[0]
    row = next(line for line in first.splitlines() if "bessel_j0" in line)
    assert row.split()[-2:] == ["512", "bytes"]  # its input, kept for the backward pass
    assert row.split()[-3] in ("µs", "ms")


@pytest.mark.usefixtures("in_this_folder")
def test_factory_that_fails_and_sizes_for_a_factory() -> None:
    assert "no such weights" in refused("plan", "cli_models:broken", "-c", "2xcpu")
    assert "a factory decides its own sizes" in refused("plan", "cli_models:plain", "-c", "2xcpu", "--seq-len", "8")


def test_bugs_are_short_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    import autopar.cache.plans
    from autopar.cli.app import app_of

    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(autopar.cache.plans, "kept_search", fail)
    short = CliRunner().invoke(app_of(), ["plan", "gpt2", "-c", "2xcpu", *SMALL])
    assert (short.exit_code, "Traceback" in short.stderr) == (1, False)
    assert "unexpected ZeroDivisionError: planted" in short.stderr
    long = CliRunner().invoke(app_of(), ["plan", "gpt2", "-c", "2xcpu", "--traceback", *SMALL])
    assert (long.exit_code, "Traceback" in long.stderr) == (1, True)
    monkeypatch.setenv("AUTOPAR_DEBUG", "1")
    assert "Traceback" in CliRunner().invoke(app_of(), ["plan", "gpt2", "-c", "2xcpu", *SMALL]).stderr


def test_after_the_time_limit_nothing_more_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise AssertionError("searched after the time limit")

    monkeypatch.setattr("autopar.planning.captured_search.with_chunks", late)
    monkeypatch.setattr("autopar.planning.captured_search.with_kept", late)
    result = autopar(
        "plan", "gpt2", "-c", "4xcpu", "--layers", "2", "--hidden", "64", "--seq-len", "24", "--global-batch", "8",
        "--timeout", "0",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "not proven: the time ended before all plans had a lower bound" in result.stdout


@pytest.mark.parametrize(("all_s", "said"), [(21.0, "21 s instead of 2 s: 15 s to build"), (2.9, "")])
def test_what_took_longer_than_the_time_limit_is_said(all_s: float, said: str) -> None:
    from autopar.cli.plan import overtime
    from autopar.planning.options import PlanOptions

    assert "".join(overtime(PlanOptions(timeout_s=2.0), 15.0, all_s)).startswith(said)
    assert not list(overtime(PlanOptions(), 15.0, all_s))


def test_a_run_of_tokens_has_days_money_and_energy() -> None:
    asked = ("plan", "gpt2", "-c", "4xh100", "--global-batch", "8", "--tokens", "2B", "--top", "1", *SMALL)
    data = json.loads(autopar(*asked, "--json").stdout)
    run, best = data["run"], data["best"]
    assert run["steps"] == pytest.approx(2e9 / (data["global_batch"] * data["sequence"]))
    assert run["days"] == pytest.approx(run["steps"] * best["step_s"] / 86400)
    assert run["energy_kwh"] == pytest.approx(run["days"] * 24 * 4 * 0.7)
    assert run["site_kwh"] == pytest.approx(run["energy_kwh"] * 1.82 * 1.56)
    shown = autopar(*asked).stdout
    assert "whole run" in shown and "kWh with hosts and cooling" in shown


def test_a_plan_says_with_which_probability_it_fits() -> None:
    asked = ("plan", "gpt2", "-c", "4xh100", "--global-batch", "8", "--top", "1", *SMALL)
    data = json.loads(autopar(*asked, "--json", "--chance", "0.75").stdout)
    assert data["chance"] == 0.75 and data["chance_of_fitting"] > 0.99
    assert "fits with over 99%" in autopar(*asked).stdout
    assert "must be from 0.5 to 0.999" in refused(*asked, "--chance", "1.5")


def test_several_clusters_are_compared() -> None:
    asked = ("plan", "gpt2", "-c", "4xh100", "-c", "4xa100", "--global-batch", "8", "--tokens", "2B", *SMALL)
    shown, data = autopar(*asked).stdout, json.loads(autopar(*asked, "--json").stdout)
    fastest = min(data, key=lambda one: one["best"]["step_s"])["cluster"]
    assert "tokens/s" in shown and shown.index(fastest) == min(shown.index("4xh100"), shown.index("4xa100"))
    assert [one["cluster"] for one in data] == ["4xh100", "4xa100"]
    assert all(one["run"]["days"] > 0 and one["plan"] is not None for one in data)
    assert "is of one cluster" in refused(*asked, "--out", "plan.json")
