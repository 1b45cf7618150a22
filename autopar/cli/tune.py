"""`autopar tune`: measure the few plans worth measuring, print every trial, write the best plan."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.command import FAILED, Answer
from autopar.cli.options import (
    ClusterOption,
    Fix,
    Forbid,
    Hidden,
    Json,
    Layers,
    Objective,
    Profile,
    Seed,
    Specialise,
    Trains,
    default_global_batch,
    option,
    positional,
    problems_of_target,
    refuse_options,
    values_by_word,
)
from autopar.cli.output import console, print_ends, progress, table
from autopar.errors import InputError, Problem
from autopar.files.atomic import write_text
from autopar.ir.cluster import ClusterSpec
from autopar.models.load import is_factory, resolve_model
from autopar.planning.options import PlanOptions
from autopar.search.result.format import plan_in_words
from autopar.words.numbers import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from autopar.commands.given import Given
    from autopar.search.measured.result import PlanTrial, TuneResult

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|min|h)?")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BATCH = 2  # sequences of the example inputs; plans have their own


_Model = Annotated[
    str,
    positional(
        "MODEL",
        "A preset, a config.json or package.module:factory, as for `autopar plan`; or a training script such as "
        "train.py, which runs until it calls autopar.parallelize. Arguments of the script follow in the same text.",
    ),
]


def tune(
    model: _Model,
    cluster: ClusterOption,
    options: PlanOptions,
    trials: Annotated[int, typer.Option(help="Plans to measure, those of the study included.")] = 5,
    budget: Annotated[str, typer.Option(help="Time after which no further trial begins: 90s, 10m, 2h.")] = "10m",
    trial_time: Annotated[str, typer.Option(help="Time after which a trial is ended as hanging.")] = "5m",
    objective: Objective = "time",
    fix: Fix = None,
    forbid: Forbid = None,
    study: Annotated[
        str | None,
        option(
            "Keep the trials in this .log file, .db file or database URL. A later run continues it, and several "
            "runs share it."
        ),
    ] = None,
    profile: Profile = None,
    calibrate: Annotated[
        bool, typer.Option(help="Measure the devices for 90 seconds first, if nobody measured their profile.")
    ] = True,
    seed: Seed = 0,
    layers: Layers = None,
    hidden: Hidden = None,
    trains: Trains = "all",
    specialise: Specialise = False,
    out: Annotated[Path | None, option("Write the best plan to this file (JSON).", "--out", "-o")] = None,
    profile_out: Annotated[
        Path | None,
        option(
            "Write the profile, corrected by the trials, to this file (YAML). (default: beside a cluster file, "
            "which then names it)"
        ),
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Measure the few plans of MODEL that are worth measuring, on the devices of this machine.

    The command searches all plans by prediction, and runs the best ones for some steps. It learns from each trial, and
    ends as soon as another trial can hardly pay. Each trial has ranks of its own, so a failed trial ends nothing.

    Example: autopar tune gpt2 -c 4xcpu --layers 4 --hidden 256 --seq-len 128 --global-batch 8 -o plan.json

    Exit status: 0 a plan was measured, 1 every trial failed, 2 wrong input, 3 no plan fits.
    """
    problems = problems_of_target("--out", out) + problems_of_target("--profile-out", profile_out)
    budget_s, trial_s = _seconds("--budget", budget, problems), _seconds("--trial-time", trial_time, problems)
    refuse_options(problems)
    spec = ClusterSpec.parse(cluster)
    options.check()
    wanted = replace(
        options,
        global_batch=options.global_batch or default_global_batch(options, spec.num_devices, None),
        objective=objective, fix=values_by_word("--fix", fix), forbid=values_by_word("--forbid", forbid),
        seed=seed,
    )  # fmt: skip
    with progress(f"building {model}") as on_progress:
        from autopar.commands.tune import Limits, tune_asked

        limits = Limits(trials=trials, budget_s=budget_s, trial_s=trial_s)
        result = tune_asked(
            lambda: _given(model, layers, hidden, options.seq_len, trains, specialise=specialise), spec, wanted, limits,
            study=study, profile=profile, calibrate=calibrate, on_progress=on_progress,
            on_trial=(lambda trial: None) if as_json else _show_trial,
        )  # fmt: skip
    if out is not None and result.plan is not None:
        result.plan.save(out)
    profiles = _keep_profile(result, cluster, profile_out)
    status = FAILED if result.best is None else 0
    return Answer(data=result.to_dict(), show=lambda: _show(result, [out, *profiles]), status=status)


def _given(
    model: str, layers: int | None, hidden: int | None, seq_len: int | None, trains: str, *, specialise: bool
) -> "Given":
    """The model that a text names, in float32 unless a factory or a script builds it."""
    from autopar.capture.request import Request
    from autopar.commands.given import Given, given_by_script, is_script

    if is_script(model):
        wished = {"--layers": layers, "--hidden": hidden, "--seq-len": seq_len, "--trains": trains}
        refused = [name for name, value in wished.items() if value not in (None, "all")]
        if refused:
            raise InputError(f"{', '.join(refused)}: a script decides its own model; change {model} instead")
        given = given_by_script(model)
        reading = given.request.reading
        reading = replace(reading, specialise=specialise or reading.specialise)
        return replace(given, request=replace(given.request, reading=reading))
    is_own = is_factory(model)
    batch, dtype = (None, None) if is_own else (_BATCH, "float32")
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "seq_len": seq_len, "batch": batch}
    built = resolve_model(model, **sizes, dtype=dtype, trains=trains)
    return Given(
        request=Request.of(built.model, built.example_inputs, built.loss_fn, specialise=specialise),
        name=built.name,
        origin=model if is_own else "",
        notes=built.notes,
    )


def _seconds(name: str, text: str, problems: list[Problem]) -> float:
    """The seconds of a text such as 90s, 10m or 2h; a bare number is seconds. Adds a problem for another text."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or not float(match[1]):
        problems.append(Problem(path=name, value=text, rule="must be a time above 0, such as 90s, 10m or 2h"))
        return 0.0
    return float(match[1]) * _SECONDS[match[2] or "s"]


def _keep_profile(result: "TuneResult", cluster: str, out: Path | None) -> list[Path]:
    """Write the corrected profile to `out`, else beside the cluster file, which then names it. Returns the files."""
    file = Path(cluster)
    is_file = file.suffix in (".yaml", ".yml") and file.is_file()
    path = out or (file.with_name(f"{file.stem}.profile.yaml") if is_file else None)
    if path is None or result.profile is None:
        return []
    from autopar.cost_model.machine.profile_io import dump_profile

    dump_profile(result.profile, path)
    text = file.read_text(encoding="utf-8") if is_file else ""
    if out is not None or not is_file or re.search(r"^profile:", text, re.MULTILINE):
        return [path]
    write_text(file, f"{text.rstrip()}\nprofile: ./{path.name}  # corrected by autopar tune\n")
    return [path, file]


def _show_trial(trial: "PlanTrial") -> None:
    from autopar.report.tuning import measured_in_words

    out, outcome = console(), trial.outcome
    what = f"trial {trial.number + 1}: {plan_in_words(trial.candidate.degrees)}"
    if outcome.seconds is None:
        first = (outcome.message.splitlines() or [""])[0]
        out.print(f"{what}: failed ({outcome.reason}): {first}", style="yellow")
        return
    more = ", surely slower than the best" if outcome.state == "pruned" else ""
    predicted = readable_seconds(trial.candidate.predicted_s)
    out.print(f"{what}: {measured_in_words(outcome.seconds)}, predicted {predicted}{more}")


def _show(result: "TuneResult", written: list[Path | None]) -> None:
    from autopar.report.tuning import best_in_words, gain_in_words, measured_in_words

    out = console()
    rows = []
    for at, trial in enumerate(result.tried):
        plan, outcome = trial.candidate, trial.outcome
        measured = "" if outcome.seconds is None else measured_in_words(outcome.seconds)
        figures = (readable_seconds(plan.predicted_s), measured, readable_bytes(plan.predicted_bytes))
        peak = "" if outcome.peak_bytes is None else readable_bytes(outcome.peak_bytes)
        ending = "best" if at == result.best else outcome.reason or "slower" * (outcome.state == "pruned")
        rows.append((plan_in_words(plan.degrees), *figures, peak, ending))
    columns = ("plan", "predicted", "measured (95 % interval)", "memory", "measured", "")
    out.print()
    out.print(table(columns, rows, right=columns[1:5]))
    for name, factor in result.factors.items():
        out.print(f"{name.replace('_', ' ')}: {factor:.2f} times the predicted time")
    settled = "settled by measurement" if result.is_settled else "not settled"
    out.print(f"no plan ran: {result.why}" if result.best is None else best_in_words(result))
    out.print(f"{settled}: {result.why}. {gain_in_words(result)}")
    print_ends([f"note: {note}" for note in result.notes], *written)
