"""Step times of published runs by predictors that know little of a layout's mechanics: python benchmarks/baselines.py

    constant MFU         model FLOP / (MFU × peak), with the median MFU of the fitted rows of a device type and
                         precision, or of all fitted rows if none has the device and precision
    Megatron's formulas  the same with a third more FLOP under full recomputation, and a pipeline whose bubble is
                         (p - 1) / (v·m) of its time (Narayanan et al. 2021, sections 2.2 and 3.2)
    boosted trees        scikit-learn's histogram gradient boosting on log MFU, over the columns that are not results

Each is fitted in two ways: on all rows ("in sample"), and on the other sources' rows. The second way needs a device and
precision that another source ran. `--tier core` takes the balanced rows only, and `--dense` the rows without experts.
`--predictions` names files of `autopar validate --out`, whose errors are printed beside. Needs
``pip install '.[benchmark]'``.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from autopar.cost_model.published.measurement import measured_seconds, model_flops
from autopar.cost_model.published.row import Row, read_rows
from autopar.cost_model.published.validation import Errors, errors
from autopar.errors import ClusterError
from autopar.ir.device_presets import device_preset

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from leave_one_out import folds

RUNS = Path(__file__).parent / "data" / "published_runs.csv"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8", "mxfp8": "float8"}
NUMBERS = (
    *("n_params", "layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "head_dim", "vocab", "seq_len"),
    *("moe_experts", "moe_topk", "gpu_mem_gb", "num_gpus", "gpus_per_node", "tp", "pp", "vpp", "cp", "ep", "dp"),
    *("zero", "micro_batch", "global_batch", "grad_accum", "sp", "gated_mlp"),
)
WORDS = ("gpu_type", "precision", "recompute", "attention", "engine", "inter_link")

Predictor = Callable[[Sequence["Run"], Sequence["Run"]], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A row with a measured time. `useful_s` are the seconds of its model FLOP at the devices' peak."""

    row: Row
    seconds: float
    useful_s: float

    @property
    def mfu(self) -> float:
        return self.useful_s / self.seconds


def timed_runs(rows: Sequence[Row]) -> list[Run]:
    """The rows that both predictors can be fitted on: with a time, model FLOP and a device whose peak is known."""
    found = []
    for row in rows:
        time, batch, peak = measured_seconds(row), row.global_batch, peak_flops_per_s(row)
        if time is None or batch is None or peak is None or row.num_gpus is None:
            continue
        # latent attention has about the products of its heads; a median MFU covers the rest
        flops = model_flops(replace(row, attention_type="mha"), batch)
        if flops is not None:
            found.append(Run(row=row, seconds=time.seconds, useful_s=flops / peak / row.num_gpus))
    return found


def peak_flops_per_s(row: Row) -> float | None:
    """The device's dense peak in the row's precision, of 16 bit where it has no other."""
    for name in (row.gpu_type, f"{row.gpu_type}gb"):
        try:
            peaks = device_preset(name or "").peaks()
        except ClusterError:
            continue
        figure = peaks.get(DTYPES.get(row.precision or "", "")) or peaks.get("float16")
        return None if figure is None else figure.value * 1e12
    return None


def constant_mfu(train: Sequence[Run], test: Sequence[Run]) -> list[float]:
    """Seconds at the median MFU of the device type and precision."""
    return _at_median(train, test, [run.useful_s for run in train], [run.useful_s for run in test])


def megatron_formulas(train: Sequence[Run], test: Sequence[Run]) -> list[float]:
    """Seconds at the median part of the peak that a device type and precision reach outside of the bubble."""
    return _at_median(train, test, [_with_bubble(run) for run in train], [_with_bubble(run) for run in test])


def _with_bubble(run: Run) -> float:
    """Seconds at the devices' peak with recomputation and the bubble of the pipeline."""
    row = run.row
    stages, ranks = row.pp or 1, (row.num_gpus or 1) / ((row.tp or 1) * (row.pp or 1) * (row.cp or 1))
    micro_batches = max(1.0, (row.global_batch or 1) / (ranks * (row.micro_batch or 1)))
    again = 4 / 3 if row.recompute == "full" else 1.0
    return run.useful_s * again * (1 + (stages - 1) / ((row.vpp or 1) * micro_batches))


def _at_median(
    train: Sequence[Run], test: Sequence[Run], of_train: Sequence[float], of_test: Sequence[float]
) -> list[float]:
    """Seconds at the peak over the median part of the peak of the device type and precision."""
    found: dict[tuple[str | None, str | None], list[float]] = {}
    for run, seconds in zip(train, of_train, strict=True):
        found.setdefault((run.row.gpu_type, run.row.precision), []).append(seconds / run.seconds)
    anywhere = median(part for parts in found.values() for part in parts)
    known = {key: median(parts) for key, parts in found.items()}
    keys = [(run.row.gpu_type, run.row.precision) for run in test]
    return [seconds / known.get(key, anywhere) for key, seconds in zip(keys, of_test, strict=True)]


def boosted_trees(train: Sequence[Run], test: Sequence[Run]) -> list[float]:
    """Seconds at the MFU that boosted trees predict from the columns."""
    import numpy
    from sklearn.ensemble import HistGradientBoostingRegressor

    codes: Mapping[str, dict[Any, int]] = {name: {} for name in WORDS}
    for run in train:
        for name in WORDS:
            codes[name].setdefault(getattr(run.row, name), len(codes[name]))

    def table(runs: Sequence[Run]) -> Any:
        missing = float("nan")
        numbers = [[missing if (v := getattr(r.row, n)) is None else math.log1p(v) for n in NUMBERS] for r in runs]
        words = [[codes[n].get(getattr(r.row, n), missing) for n in WORDS] for r in runs]
        return numpy.concatenate([numpy.array(numbers, float), numpy.array(words, float)], axis=1)

    known = table(train)
    kept = [i for i in range(known.shape[1]) if len(set(known[:, i][~numpy.isnan(known[:, i])])) > 1]
    is_word = [i >= len(NUMBERS) for i in kept]
    model = HistGradientBoostingRegressor(
        categorical_features=is_word, learning_rate=0.05, max_iter=300, min_samples_leaf=5, random_state=0
    )
    model.fit(known[:, kept], [math.log(run.mfu) for run in train])
    logs = model.predict(table(test)[:, kept])
    return [run.useful_s / math.exp(value) for run, value in zip(test, logs, strict=True)]


PREDICTORS: Mapping[str, Predictor] = {
    "constant MFU": constant_mfu,
    "Megatron's formulas": megatron_formulas,
    "boosted trees": boosted_trees,
}


def in_sample(runs: Sequence[Run], predictor: Predictor) -> dict[str, float]:
    """Seconds of every run by its row's id, fitted on all of them."""
    return {run.row.id: s for run, s in zip(runs, predictor(runs, runs), strict=True)}


def source_left_out(runs: Sequence[Run], predictor: Predictor) -> dict[str, float]:
    """Seconds by id of the runs whose device and precision other sources ran, fitted on those sources."""
    found: dict[str, float] = {}
    for fold in folds([run.row for run in runs]):
        test = [runs[i] for i in fold.test]
        seconds = predictor([runs[i] for i in fold.train], test)
        found |= {run.row.id: s for run, s in zip(test, seconds, strict=True)}
    return found


def errors_of(runs: Sequence[Run], seconds: Mapping[str, float], ids: frozenset[str]) -> Errors:
    """Errors of predicted `seconds` over the rows `ids`."""
    return errors(seconds[r.row.id] / r.seconds - 1 for r in runs if r.row.id in ids and r.row.id in seconds)


def read_predictions(path: Path) -> dict[str, float]:
    """Seconds by id of a file that `autopar validate --out` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        return {line["id"]: float(line["seconds"]) for line in csv.DictReader(file)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=RUNS)
    parser.add_argument("--tier", choices=("core", "all"), default="core")
    parser.add_argument("--dense", action="store_true", help="rows without experts only")
    parser.add_argument("--predictions", type=Path, help="of autopar, fitted on all rows")
    parser.add_argument("--left-out", type=Path, help="of autopar, each fitted without the row's source")
    given = parser.parse_args()
    rows = [row for row in read_rows(given.runs) if given.tier == "all" or row.tier == "core"]
    runs = timed_runs([row for row in rows if not (given.dense and row.moe_experts)])
    ways: list[tuple[str, dict[str, dict[str, float]], Path | None]] = [
        ("in sample", {name: in_sample(runs, p) for name, p in PREDICTORS.items()}, given.predictions),
        ("source left out", {name: source_left_out(runs, p) for name, p in PREDICTORS.items()}, given.left_out),
    ]
    print(f"{'':40}{'n':>6}{'median':>9}{'mean':>9}{'p90':>9}{'worst':>9}{'bias':>9}")
    for way, predicted, path in ways:
        if path is not None:
            predicted["autopar"] = read_predictions(path)
        ids = frozenset.intersection(*(frozenset(seconds) for seconds in predicted.values()))  # the same rows for all
        for name, seconds in predicted.items():
            e = errors_of(runs, seconds, ids)
            figures = (e.median, e.mean, e.p90, e.max)
            cells = "".join("" if value is None else f"{value:>9.1%}" for value in figures)
            print(f"{way + ', ' + name:40}{e.n:>6}{cells}{e.bias or 0.0:>+9.1%}")


if __name__ == "__main__":
    main()
