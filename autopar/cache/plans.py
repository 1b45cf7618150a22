"""Searches of the models that autopar builds itself, kept in a folder by all that they depend on.

A file's name is a hash of the capture's record, what was asked, the cluster and its profile, and the versions and
source of what searched, so that finding it again needs neither the captured program nor torch. A search that ended
early, by a time limit, is not kept, nor one with a study, which keeps its own trials, nor one of a model whose capture
cannot be kept. A file that cannot be read is passed over and written anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import AutoparError, InputError
from autopar.files.kept import keep, used, versions
from autopar.planning.request import SearchRequest, question_about

if TYPE_CHECKING:
    from autopar.cache.captures import CapturedModel
    from autopar.ir.cluster import ClusterSpec
    from autopar.search.result.result import SearchResult


def kept_search(
    folder: Path,
    captured: CapturedModel,
    cluster: ClusterSpec,
    asked: SearchRequest,
    *,
    say: Callable[[str], None],
) -> SearchResult:
    """What `autopar.planning.search.search_captured` finds, or found before. `asked` names a precision."""
    from autopar.search.result.result import SearchResult

    is_kept = not (asked.study or asked.timeout_s) and captured.digest is not None
    path = folder / "plans" / f"{_key(captured, cluster, asked)}.json" if is_kept else None
    if path is not None and path.is_file():
        try:
            found = SearchResult.from_dict(json.loads(path.read_text(encoding="utf-8")), str(path))
        except (OSError, ValueError, AutoparError):
            say("a kept search cannot be read; searching again")
        else:
            used(path)
            return replace(found, notes=(*found.notes, f"found by an earlier search, kept as {path}"))
    from autopar.planning.search import search_captured

    found = search_captured(
        captured.capture, cluster, asked, name=captured.name, say=say, labels_folder=folder / "labels"
    )
    if path is not None:
        keep(path, json.dumps(found.to_dict(), separators=(",", ":"), sort_keys=True))
    return found


def _key(captured: CapturedModel, cluster: ClusterSpec, asked: SearchRequest) -> str:
    from autopar.planning.machine import machine_of

    if asked.precision is None:
        raise InputError("a search is kept by its precision; name one")
    machine = machine_of(cluster, asked.profile, asked.precision)
    question = [captured.digest, question_about(asked, cluster, machine, asked.precision, captured.name)]
    rest = [asked.top, asked.trials, asked.seed, asked.report, asked.what_if, list(machine.assumptions), versions()]
    return hashlib.sha256(json.dumps([question, rest], sort_keys=True).encode()).hexdigest()[:40]
