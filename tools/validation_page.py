"""Writes docs/validation.md: predictions of the cost model for published runs, beside baselines on the same rows:

    python tools/validation_page.py [--left-out PREDICTIONS.csv] [--without-baselines]

`--left-out` names predictions of the published runs by a model fitted without the row's source, in the columns of
`autopar validate --out`. Baselines need ``pip install '.[benchmark]'``.
"""

import argparse
import csv
import datetime
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from audiences import audiences
from leave_one_out import engine, folds
from prediction_gate import ACCEPTED
from prediction_intervals import coverage, residuals

from autopar.cost_model.published.row import Estimator, Row, read_rows
from autopar.cost_model.published.validation import (
    Errors,
    Measures,
    Ranking,
    RowComparison,
    compared_rows,
    errors,
    measures,
    split_by,
    validation_of,
)

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "validation.md"
RUNS = ROOT / "benchmarks" / "data" / "published_runs.csv"
UNSEEN = ROOT / "benchmarks" / "data" / "unseen_runs.csv"
SWEEP = ROOT / "benchmarks" / "data" / "sweep_vtrain_single_a100.csv"
LEFT_OUT = ROOT / "benchmarks" / "results" / "left_out_predictions.csv"
ENGINE_LEFT_OUT = ROOT / "benchmarks" / "results" / "left_out_engines.csv"
ERRORS = ("median", "mean", "p90", "worst", "bias")

INTRODUCTION = """# What the cost model says of published runs

`autopar validate benchmarks/data/published_runs.csv --tier core` prints these figures: step time and memory that
others published, beside autopar's predictions from model, machine and layout alone. The columns of the result are
removed before a row is predicted. `benchmarks/data` holds the runs and their description.

| word | meaning |
| --- | --- |
| error | predicted / measured - 1 |
| median, mean, p90, worst | of the size of the error; p90 is the 90th percentile |
| bias | the median of the error with its sign |
| time | the stated step time, else the time that follows from the source's throughput |
| tier `core` | rows balanced over sources; the other rows are sweeps of layouts, for ranking |
| state enough | rows that state everything the model needs |

The data has noise: the same configuration published twice differs by 4.6 % in the median, and by 2 to 16 % in all
cases.
"""


def page(
    estimator: Estimator, *, left_out: Mapping[str, float] | None, with_baselines: bool, today: datetime.date
) -> str:
    """The whole page."""
    rows = read_rows(RUNS)
    start = time.process_time()
    everything = compared_rows(rows, estimator)
    seconds = time.process_time() - start
    core = [one for one in everything if one.row.tier == "core"]
    swept = read_rows(SWEEP)
    sweep = compared_rows(swept, estimator)
    text = [
        INTRODUCTION,
        f"Written by `python tools/validation_page.py` on {today.isoformat()}. Predicting the {len(rows)} rows took\n"
        f"{seconds:.2f} processor seconds.\n",
        _audiences(),
        _overall(core, everything, sweep),
        _unseen(estimator),
        _by("## By source, tier core", split_by(core, "source_key")),
        _by("## By source, all rows", split_by(everything, "source_key")),
        _by("## By GPU, tier core", split_by(core, "gpu_type")),
        _ranking(everything, sweep),
        _left_out(core, left_out),
        _engine_left_out(core),
    ]
    if with_baselines:
        text.append(_baselines(core, left_out))
    text += [_iteration_times(estimator), _memory(everything), _not_modelled(everything)]
    return "\n".join(text)


def _audiences() -> str:
    header = ("", "timed", "median", "p90", "inside", "memory rows", "median", "p90", "inside", "ran, said not to fit")
    lines = []
    reasons = json.loads(ACCEPTED.read_text())["exceptions"]
    exceptions = "\n".join(f"- {name}: {reason}." for name, reason in reasons.items())
    for name, part in audiences().items():
        m = measures(part)
        time, memory = (
            (e.n, _percent(e.median), _percent(e.p90), f"{inside} of {e.n}")
            for e, inside in ((m.step_time, m.time_inside), (m.memory, m.memory_inside))
        )
        lines.append((name, *time, *memory, f"{m.oom.ok_predicted_oom} of {m.oom.ok_rows}"))
    return (
        "## For whom the figures hold\n\n"
        "Rows of tier core by audience. *Inside* counts the runs inside their 80 % interval. Constants and\n"
        "mechanisms were chosen by the sets that are not held back. Nobody looked at a row of a held set: only\n"
        "these totals were read. Users' machines have 1 to 8 GPUs, with Hugging Face, DeepSpeed or a script.\n"
        "`tools/prediction_gate.py` fails if an error grows by 3 % of its best. It fails too if a coverage leaves\n"
        f"70 to 90 %, but for these:\n\n{exceptions}\n\n"
        f"{_table(header, lines)}"
    )


def _overall(core: Sequence[RowComparison], everything: Sequence[RowComparison], sweep: Sequence[RowComparison]) -> str:
    dense = [one for one in core if not one.row.moe_experts]
    named = {
        "tier core": core,
        "tier core, dense": dense,
        "tier core, experts": [one for one in core if one.row.moe_experts],
        "all rows": everything,
        "vTrain's single-node sweep": sweep,
    }
    weighed = validation_of(core).mean_over_sources["step_time"]
    note = (
        ""
        if weighed is None
        else f"\nEvery source weighed once, the mean of the medians of tier core is {weighed:.1%}.\n"
    )
    return _by("## All together", named) + note


def _unseen(estimator: Estimator) -> str:
    rows = read_rows(UNSEEN)
    compared = compared_rows(rows, estimator)
    parts = {
        **split_by(compared, "source_key"),
        "all, dense": [one for one in compared if not one.row.moe_experts],
        "all, experts": [one for one in compared if one.row.moe_experts],
        "all": compared,
    }
    header, lines = ("", "timed", *ERRORS, "inside", "fits"), []
    for name, part in parts.items():
        timed = [(one.time.seconds, one.predicted) for one in part if one.time and one.predicted]
        inside = sum(made.interval_s.low <= seconds <= made.interval_s.high for seconds, made in timed)
        fits = sum(made.fits is True for _, made in timed)
        lines.append((name, *_errors(measures(part).step_time), f"{inside} of {len(timed)}", f"{fits} of {len(timed)}"))
    return (
        "## Runs that nobody fitted\n\n"
        "The tables of NVIDIA's NeMo user guides and of Megatron-Bridge (`benchmarks/data/unseen_runs.csv`) were\n"
        "read when the cost model was done. They are in no fit. The fit has other runs of the same vendor, some\n"
        "of the same models. Two kinds of cells were corrected after a first look at the errors: the attention\n"
        "kernel of Automodel, which its table states, and the head width of its models with latent attention,\n"
        "which was typed with the rotated part. The rows of Megatron-Bridge were read after that, and nothing was\n"
        "changed after their score. Only their recipes state recomputation: `bridge_modules` are four lists of\n"
        "modules with one model. `nemo_automodel_06` states no expert parallelism, which its time contradicts.\n"
        "*Inside* counts the runs inside their 80 % interval. *Fits* counts the runs that are predicted to fit.\n"
        f"All of them did, except perhaps `bridge_modules_1` and `_4`, whose first rank ran out of memory.\n\n"
        f"{_table(header, lines)}"
    )


def _by(title: str, parts: Mapping[str, Sequence[RowComparison]]) -> str:
    header = ("", "rows", "modelled", "state enough", "timed", *ERRORS, "memory rows", "median", "bias")
    lines = []
    for name, part in parts.items():
        m: Measures = measures(part)
        stated = f"{m.stated_modelled} of {m.stated}"
        memory = (m.memory.n or "", _percent(m.memory.median), _signed(m.memory.bias))
        lines.append((name, m.rows, m.modelled, stated, *_errors(m.step_time), *memory))
    return f"{title}\n\n{_table(header, lines)}"


def _ranking(everything: Sequence[RowComparison], sweep: Sequence[RowComparison]) -> str:
    found = validation_of(everything)
    header = ("", "groups", "layouts", "rank correlation, median group", "worst tenth", "regret, median group", "p90")
    lines = [
        (name, r.groups, r.layouts, _two(r.correlation_median), _two(r.correlation_p10), *_regrets(r))
        for name, r in {
            "published runs": found.overall.ranking,
            **{key: part.ranking for key, part in found.by.items() if part.ranking.groups},
            "vTrain's single-node sweep": measures(sweep).ranking,
        }.items()
    ]
    groups = [
        (g.name, g.layouts, _two(g.correlation), _percent(g.regret), f"`{g.predicted_best}`", f"`{g.measured_best}`")
        for g in found.groups
    ]
    each = _table(("work", "layouts", "rank correlation", "regret", "predicted fastest", "measured fastest"), groups)
    return (
        "## Layouts of the same work\n\n"
        "Groups of at least five layouts of the same model, devices, batch, sequence and precision. The regret is the\n"
        "measured time of the layout predicted fastest over the best measured, minus 1.\n\n"
        f"{_table(header, lines)}\n{each}"
    )


def _left_out(core: Sequence[RowComparison], left_out: Mapping[str, float] | None) -> str:
    title = "## With the source left out\n"
    if left_out is None:
        return f"{title}\nNo predictions were given.\n"
    timed = [one for one in core if one.time is not None]
    rows = [one.row for one in timed]
    header = ("source", "timed", *ERRORS)

    def of(chosen: Sequence[RowComparison]) -> Errors:
        return errors(left_out[c.row.id] / c.time.seconds - 1 for c in chosen if c.time and c.row.id in left_out)

    parts = {fold.group: [timed[i] for i in fold.test] for fold in folds(rows)}
    lines = [(source, *_errors(of(part))) for source, part in parts.items()]
    known = [one for part in parts.values() for one in part]
    dense = [one for one in known if not one.row.moe_experts]
    lines += [
        ("all", *_errors(of(known))),
        ("all, dense", *_errors(of(dense))),
        ("every row, also of devices that no other source ran", *_errors(of(timed))),
    ]
    return (
        f"{title}\nThe constants are fitted on the other sources alone. The rows are those of tier core with a "
        f"device and precision that another source has too.\n\n{_table(header, lines)}"
    )


def _engine_left_out(core: Sequence[RowComparison]) -> str:
    """Errors and coverage of the predictions without the engine's runs."""
    with ENGINE_LEFT_OUT.open(encoding="utf-8") as file:
        found = {line["id"]: line for line in csv.DictReader(file)}
    timed = [one for one in core if one.time is not None and one.row.id in found]
    header = ("engine", "timed", *ERRORS, "as an unknown framework", "p90")

    def of(chosen: Sequence[RowComparison], column: str) -> Errors:
        return errors(float(found[c.row.id][column]) / c.time.seconds - 1 for c in chosen if c.time)

    parts: dict[str, list[RowComparison]] = {}
    for one in timed:
        parts.setdefault(engine(one.row), []).append(one)
    every = {
        **dict(sorted(parts.items())),
        "all, dense": [one for one in timed if not one.row.moe_experts],
        "all, experts": [one for one in timed if one.row.moe_experts],
    }
    lines = []
    for name, part in every.items():
        guessed = of(part, "guessed_seconds")
        lines.append((name, *_errors(of(part, "seconds")), _percent(guessed.median), _percent(guessed.p90)))
    inside: list[tuple[object, ...]] = []
    for figure, by_situation in residuals([one.row for one in core]).items():
        for name in ("known engine", "guessed engine", "measured step"):
            if by_situation.get(name):
                counted = coverage(by_situation[name])
                own, count = (sum(pair[i] for pair in counted.values()) for i in (0, 1))
                least, of_least = min(counted.items(), key=lambda item: item[1][0] / item[1][1])
                worst = f"{least}: {of_least[0]} of {of_least[1]}"
                inside.append((f"{figure}, {name}", count, f"{own / count:.0%}", worst))
    covered = _table(("", "rows", "inside", "worst engine"), inside)
    return (
        "## With the engine left out\n\n"
        "The constants are fitted on the runs of the other engines alone. An engine is left out in all its years. The\n"
        "mechanisms of an engine profile are not fitted. The last two columns hide the framework, so that the neutral\n"
        "engine is used.\n\n"
        f"{_table(header, lines)}\n"
        "The 80 % interval of each engine is made of the runs of the other engines, without experts. This part of the\n"
        f"runs is inside:\n\n{covered}"
    )


def _baselines(core: Sequence[RowComparison], left_out: Mapping[str, float] | None) -> str:
    """Simpler predictors on the rows that all of them know."""
    module: Any = _benchmark("baselines")
    estimated = {c.row.id: c.predicted.seconds for c in core if c.predicted}
    lines: list[tuple[object, ...]] = []
    for kind, chosen in (("", core), (", dense", [c for c in core if not c.row.moe_experts])):
        runs = module.timed_runs([c.row for c in chosen])
        for way, predictions, own in (
            ("in sample", module.in_sample, estimated),
            ("source left out", module.source_left_out, left_out),
        ):
            found = {name: predictions(runs, one) for name, one in module.PREDICTORS.items()}
            if own is not None:
                found["**autopar**"] = own
            ids = frozenset.intersection(*(frozenset(seconds) for seconds in found.values()))
            lines += [(f"{name}, {way}{kind}", *_errors(module.errors_of(runs, s, ids))) for name, s in found.items()]
    return (
        "## Beside simpler predictors\n\n"
        "One MFU per device and precision, the same with the published formulas of Megatron-LM for recomputation and\n"
        "the bubble, and boosted trees over the columns (`benchmarks/baselines.py`), on the\n"
        "same rows of tier core.\n\n"
        f"{_table(('', 'timed', *ERRORS), lines)}"
    )


def _iteration_times(estimator: Estimator) -> str:
    rows: list[Row] = _benchmark("iteration_times").iteration_times()
    compared = compared_rows(rows, estimator)
    lines = [
        (c.row.model, c.row.num_gpus, c.row.recompute, f"{c.time.seconds:.2f}", _signed(c.time_error))
        for c in compared
        if c.time is not None
    ]
    found = measures(compared).step_time
    return (
        "## Eight iteration times of Korthikanti et al. 2022\n\n"
        f"Mean error {_percent(found.mean)}, worst {_percent(found.max)}.\n\n"
        f"{_table(('model', 'GPUs', 'recompute', 'published s', 'error'), lines)}"
    )


def _memory(everything: Sequence[RowComparison]) -> str:
    oom = measures(everything).oom
    ran_out = [one for one in everything if one.row.outcome == "oom"]
    missed = [f"`{o.row.id}`" for o in ran_out if o.predicted and o.predicted.fits]
    kinds: dict[str, list[RowComparison]] = {}
    for one in everything:
        if one.memory_error is not None:
            kinds.setdefault((one.row.mem_kind or "").partition(";")[0], []).append(one)
    lines = [(kind, *_errors(errors(one.memory_error for one in part))) for kind, part in sorted(kinds.items())]
    return (
        "## Memory by how it was measured\n\n"
        "Sizes are read as GiB, as torch and nvidia-smi count. A device has the `total_memory` that torch reports.\n"
        f"Of {oom.oom_rows} rows that ran out of memory {oom.oom_predicted} are predicted not to fit, the others\n"
        f"({', '.join(missed)}) to fit; of {oom.ok_rows} that ran, {oom.ok_predicted_oom} are predicted "
        f"not to fit.\n\n{_table(('memory is', 'rows', *ERRORS), lines)}"
    )


def _not_modelled(everything: Sequence[RowComparison]) -> str:
    found: dict[str, list[str]] = {}
    for one in validation_of(everything).unmodelled:
        found.setdefault(one.reason, []).append(one.id)
    lines = [f"- {reason}: {', '.join(f'`{row}`' for row in ids)}" for reason, ids in found.items()]
    return "\n".join(["## Rows not modelled\n", *(lines or ["None."]), ""])


def _errors(found: Errors) -> tuple[object, ...]:
    sizes = (found.median, found.mean, found.p90, found.max)
    return (found.n or "", *(_percent(value) for value in sizes), _signed(found.bias))


def _regrets(ranking: Ranking) -> tuple[str, str]:
    return _percent(ranking.regret_median), _percent(ranking.regret_p90)


def _table(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _benchmark(name: str) -> Any:
    """A module of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left-out", type=Path, default=LEFT_OUT)
    parser.add_argument("--without-baselines", action="store_true")
    parser.add_argument("--out", type=Path, default=TARGET)
    given = parser.parse_args()
    from autopar.cost_model.published.estimate import estimate_rows

    read: Callable[[Path], Mapping[str, float]] = _benchmark("baselines").read_predictions
    left_out = read(given.left_out) if given.left_out.exists() else None
    today = datetime.datetime.now(datetime.UTC).date()
    text = page(estimate_rows, left_out=left_out, with_baselines=not given.without_baselines, today=today)
    given.out.write_text(text, encoding="utf-8")
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
