"""The errors of predictions for published runs.

The error of a row is predicted / measured - 1. Over rows, the median, mean, 90th percentile and worst are of its
absolute value. The bias is the median of the signed error: -0.1 means that predictions are a tenth too small.

A source with many rows would decide the median over rows, so `Validation.mean_over_sources` weighs every source once.
`autopar.cost_model.published.ranking` ranks the layouts of the same work. Rows that ran out of memory have no error,
and count in `Oom`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from autopar.cost_model.published.measurement import StepTime, measured_bytes, measured_seconds
from autopar.cost_model.published.ranking import RankedGroup, RowTimes, ranked_groups
from autopar.cost_model.published.row import Estimator, NoEstimate, Row, RowEstimate
from autopar.errors import AutoparError

By = Literal["source_key", "gpu_type", "group"]
BY: tuple[By, ...] = ("source_key", "gpu_type", "group")
NOT_STATED = "(not stated)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowComparison:
    """A row beside its prediction; a value that was not measured is None."""

    row: Row
    estimate: RowEstimate | NoEstimate
    time: StepTime | None
    memory_bytes: float | None

    @property
    def predicted(self) -> RowEstimate | None:
        """The estimate of a modelled row."""
        return self.estimate if isinstance(self.estimate, RowEstimate) else None

    @property
    def time_error(self) -> float | None:
        """predicted / measured - 1 of the step time."""
        return self.predicted.seconds / self.time.seconds - 1 if self.predicted and self.time else None

    @property
    def memory_error(self) -> float | None:
        """predicted / measured - 1 of the peak memory."""
        return self.predicted.peak_bytes / self.memory_bytes - 1 if self.predicted and self.memory_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors over `n` rows, as fractions; None where there are no rows."""

    n: int
    median: float | None = None
    p90: float | None = None
    mean: float | None = None
    max: float | None = None
    bias: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rank correlation and measured regret over groups of layouts: of the median group, and of the worst tenth."""

    groups: int
    layouts: int
    correlation_median: float | None = None
    correlation_p10: float | None = None
    regret_median: float | None = None
    regret_p90: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    """The number of rows that ran out of memory and of rows that ran, and how many of each are predicted not to fit."""

    oom_rows: int
    oom_predicted: int
    ok_rows: int
    ok_predicted_oom: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """All figures of one set of rows."""

    rows: int
    modelled: int
    stated: int  # rows that state enough to be modelled
    stated_modelled: int
    step_time: Errors
    memory: Errors
    time_inside: int  # rows whose measured value is in the interval of the prediction
    memory_inside: int
    ranking: Ranking
    oom: Oom


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Predictions of rows beside their measurements; `groups` are the ranked ones."""

    compared: tuple[RowComparison, ...]
    overall: Measures
    by_column: By
    by: Mapping[str, Measures]
    mean_over_sources: Mapping[str, float | None]
    groups: tuple[RankedGroup, ...]

    @property
    def unmodelled(self) -> tuple[NoEstimate, ...]:
        return tuple(c.estimate for c in self.compared if isinstance(c.estimate, NoEstimate))

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """Id and text of each warning, in the rows' order."""
        return tuple((c.row.id, text) for c in self.compared if c.predicted for text in c.predicted.warnings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; errors as fractions."""
        return {
            "overall": asdict(self.overall),
            "by": {name: asdict(measures) for name, measures in self.by.items()},
            "by_column": self.by_column,
            "mean_over_sources": dict(self.mean_over_sources),
            "ranked_groups": [asdict(group) for group in self.groups],
            "unmodelled": [asdict(row) for row in self.unmodelled],
            "warnings": [{"id": row_id, "text": text} for row_id, text in self.warnings],
        }


def compared_rows(rows: Sequence[Row], estimator: Estimator) -> tuple[RowComparison, ...]:
    """Predict every row without its result, and put the estimate beside it. `estimator` never sees a measured value."""
    estimates = list(estimator([row.without_result() for row in rows]))
    if [e.id for e in estimates] != [row.id for row in rows]:
        raise AutoparError(f"{len(rows)} rows were given and {len(estimates)} estimates of other rows came back")
    for e in estimates:
        if isinstance(e, RowEstimate) and not (e.seconds > 0 and isfinite(e.seconds + e.peak_bytes)):
            raise AutoparError(f"{e.id} was predicted to take {e.seconds} s and {e.peak_bytes} bytes")
    return tuple(
        RowComparison(
            row=row,
            estimate=estimate,
            time=measured_seconds(row, global_batch=getattr(estimate, "global_batch", None)),
            memory_bytes=measured_bytes(row),
        )
        for row, estimate in zip(rows, estimates, strict=True)
    )


def validate_rows(rows: Sequence[Row], estimator: Estimator, *, by: By = "source_key") -> Validation:
    """Predict rows, and measure the errors."""
    return validation_of(compared_rows(rows, estimator), by=by)


def validation_of(compared: Sequence[RowComparison], *, by: By = "source_key") -> Validation:
    """All measures, over everything and per value of a column."""
    parts = split_by(compared, by)
    sources = split_by(compared, "source_key").values()
    return Validation(
        compared=tuple(compared),
        overall=measures(compared),
        by_column=by,
        by={name: measures(part) for name, part in parts.items()},
        mean_over_sources={
            "step_time": _mean_of_medians(sources, lambda c: c.time_error),
            "memory": _mean_of_medians(sources, lambda c: c.memory_error),
        },
        groups=ranked_groups(timed_rows(compared)),
    )


def split_by(compared: Iterable[RowComparison], column: By) -> dict[str, list[RowComparison]]:
    """The rows per value of a column, sorted by it."""
    groups: dict[str, list[RowComparison]] = {}
    for row in compared:
        groups.setdefault(getattr(row.row, column) or NOT_STATED, []).append(row)
    return dict(sorted(groups.items()))


def measures(compared: Sequence[RowComparison]) -> Measures:
    """The figures of one set of rows."""
    predicted = [(c, c.predicted) for c in compared if c.predicted]
    modelled = [c for c, _ in predicted]
    stated = [c for c in compared if not c.row.not_stated()]
    return Measures(
        rows=len(compared),
        modelled=len(modelled),
        stated=len(stated),
        stated_modelled=sum(c.predicted is not None for c in stated),
        step_time=errors(c.time_error for c in modelled),
        memory=errors(c.memory_error for c in modelled),
        time_inside=sum(c.time is not None and e.interval_s.holds(c.time.seconds) for c, e in predicted),
        memory_inside=sum(e.interval_bytes.holds(c.memory_bytes) for c, e in predicted if c.memory_bytes is not None),
        ranking=_ranking(ranked_groups(timed_rows(compared))),
        oom=_oom(modelled),
    )


def errors(signed: Iterable[float | None]) -> Errors:
    """The figures of relative errors with their signs; None is skipped."""
    values = [value for value in signed if value is not None]
    if not values:
        return Errors(n=0)
    sizes = sorted(abs(value) for value in values)
    return Errors(
        n=len(values),
        median=median(sizes),
        p90=float(np.quantile(sizes, 0.9)),
        mean=fmean(sizes),
        max=sizes[-1],
        bias=median(values),
    )


def _ranking(groups: Sequence[RankedGroup]) -> Ranking:
    if not groups:
        return Ranking(groups=0, layouts=0)
    correlations, regrets = [g.correlation for g in groups], [g.regret for g in groups]
    return Ranking(
        groups=len(groups),
        layouts=sum(g.layouts for g in groups),
        correlation_median=median(correlations),
        correlation_p10=float(np.quantile(correlations, 0.1)),
        regret_median=median(regrets),
        regret_p90=float(np.quantile(regrets, 0.9)),
    )


def timed_rows(compared: Iterable[RowComparison]) -> list[RowTimes]:
    """The rows with a measured and a predicted time."""
    return [
        RowTimes(row=c.row, measured_s=c.time.seconds, predicted_s=c.predicted.seconds)
        for c in compared
        if c.time and c.predicted
    ]


def _oom(modelled: Iterable[RowComparison]) -> Oom:
    known = [(c.row.outcome, c.predicted.fits) for c in modelled if c.predicted]
    known = [(outcome, fits) for outcome, fits in known if outcome is not None and fits is not None]
    return Oom(
        oom_rows=sum(outcome == "oom" for outcome, _ in known),
        oom_predicted=known.count(("oom", False)),
        ok_rows=sum(outcome == "ok" for outcome, _ in known),
        ok_predicted_oom=known.count(("ok", False)),
    )


def _mean_of_medians(
    sources: Iterable[Sequence[RowComparison]], error: Callable[[RowComparison], float | None]
) -> float | None:
    medians = [errors(error(c) for c in source).median for source in sources]
    known = [value for value in medians if value is not None]
    return fmean(known) if known else None
