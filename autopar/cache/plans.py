"""Searches of the models that autopar builds itself, kept by `autopar.cache.store`.

A search depends on the capture, the request, the cluster and its profile, and on all of autopar's source, so that
finding it again needs neither the captured program nor torch. Three kinds of searches are not kept. A search with a
time limit may have ended early. A study keeps its own trials. A user's factory may change without notice.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cache.store import SEARCHING, KeptFile, kept_file, versions
from autopar.planning.options import PlanOptions
from autopar.planning.study_question import question_about

if TYPE_CHECKING:
    from autopar.cache.captures import CapturedModel
    from autopar.ir.cluster import ClusterSpec
    from autopar.search.result.result import SearchResult


def kept_search(
    folder: Path,
    captured: CapturedModel,
    cluster: ClusterSpec,
    options: PlanOptions,
    *,
    on_progress: Callable[[str], None],
) -> SearchResult:
    """What `autopar.planning.captured_search.search_captured` finds, or found before. Captures have a digest."""
    is_kept = not (options.study or options.timeout_s) and captured.digest is not None
    file = _file(folder / "plans", captured, cluster, options) if is_kept else None
    known = None if file is None else file.read(_read, on_progress)
    if file is not None and known is not None:
        return replace(known, notes=(*known.notes, f"found by an earlier search, kept as {file.path}"))
    from autopar.planning.captured_search import labels_for, search_captured

    result = search_captured(
        captured.capture,
        cluster,
        options,
        name=captured.name,
        on_progress=on_progress,
        labels=labels_for(captured.capture, cluster, options, on_progress, folder / "labels"),
    )
    if file is not None:
        file.write(json.dumps(result.to_dict(), separators=(",", ":"), sort_keys=True), on_progress)
    return result


def _read(path: Path) -> SearchResult:
    from autopar.search.result.result import SearchResult

    return SearchResult.from_dict(json.loads(path.read_text(encoding="utf-8")), str(path))


def _file(folder: Path, captured: CapturedModel, cluster: ClusterSpec, wish: PlanOptions) -> KeptFile:
    from autopar.cost_model.machine.cluster import default_precision
    from autopar.planning.machine import machine_of

    machine = machine_of(cluster, wish.profile, wish.precision or default_precision(cluster), wish.reduce_dtype)
    question = question_about(wish, cluster, machine, captured.name)
    options = [wish.top, wish.trials, wish.seed, wish.report, list(machine.assumptions)]
    options += [wish.precision, wish.reduce_dtype]
    return kept_file(folder, "search", captured.digest, question, options, versions(SEARCHING))
