"""The plans that `autopar.tune` measured to be the best, kept by cluster and class of model for ``plan="tuned"``.

A file holds the newest plan of each model, batch and objective. Whether a plan is of a model is told by its
fingerprint, which needs a capture.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.cache.store import KeptFile, kept_file
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan

TUNED = "tuned"  # the word for these plans
_MOST = 50  # plans in a file


def keep_tuned(folder: Path, cluster: ClusterSpec, kind: str, plan: Plan, about: dict[str, Any]) -> None:
    """Keep a measured plan for these devices and this class of model."""
    file = _file(folder, cluster, kind)
    entry = {"plan": plan.to_dict(), **about}
    others = [each for each in _entries(file) if _question(each) != _question(entry)]
    file.write(json.dumps([entry, *others][:_MOST]))


def tuned_plans(folder: Path, cluster: ClusterSpec, kind: str) -> list[Plan]:
    """The kept plans of a class of models, the newest first."""
    return [Plan.from_dict(e["plan"], "the kept plan") for e in _entries(_file(folder, cluster, kind))]


def _file(folder: Path, cluster: ClusterSpec, kind: str) -> KeptFile:
    return kept_file(folder / TUNED, "tuned plans", replace(cluster, name="", profile=None).to_dict(), kind)


def _entries(file: KeptFile) -> list[dict[str, Any]]:
    def parse(path: Path) -> list[dict[str, Any]]:
        entries = json.loads(path.read_text(encoding="utf-8"))
        for entry in entries:
            Plan.from_dict(entry["plan"], str(path))
        return list(entries)

    return file.read(parse, lambda _: None) or []


def _question(entry: dict[str, Any]) -> tuple[Any, ...]:
    """The model, the batch and the objective of a plan."""
    return entry.get("model"), entry.get("global_batch"), entry.get("objective"), entry["plan"].get("sequence")
