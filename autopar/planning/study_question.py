"""The question that a study answers, as plain values: a study is only continued for the same question."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar._version import __version__
from autopar.planning.options import PlanOptions

if TYPE_CHECKING:
    from autopar.cost_model.machine.machine import Machine
    from autopar.ir.cluster import ClusterSpec
    from autopar.ir.program import Program
    from autopar.search.bounds.lower_bounds import Machinery


def question_of(
    options: PlanOptions, program: "Program", cluster: "ClusterSpec", on: "Machinery", name: str
) -> dict[str, str | int]:
    """All inputs of prices and candidates."""
    about = question_about(options, cluster, on.machine, name)
    return about | {
        "engine": on.machine.engine.name,
        "fingerprint": program.fingerprint,
        "sequence": program.sequence or 1,
    }


def question_about(options: PlanOptions, cluster: "ClusterSpec", machine: "Machine", name: str) -> dict[str, str | int]:
    """The part of `question_of` that does not need the program."""
    fix, forbid = options.narrowing()

    def words(given: Mapping[str, tuple[int | str, ...]]) -> str:
        return json.dumps({word: sorted(map(str, values)) for word, values in given.items()}, sort_keys=True)

    profile = repr(replace(machine, assumptions=()))  # assumptions about a profile's age change from day to day
    return {
        "autopar": __version__,
        "model": name,
        "cluster": cluster.name,
        "cluster_sha256": _sha256(json.dumps(cluster.to_dict(), sort_keys=True)),
        "precision": machine.precision,
        "profile": machine.profile.name,
        "profile_sha256": _sha256(profile),
        "batch": f"global {options.global_batch}" if options.local_batch is None else f"local {options.local_batch}",
        "objective": options.objective,
        "chance": f"{options.chance:g}",
        "fix": words(fix),
        "forbid": words(forbid),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
