"""Labels of the models that autopar builds itself, and what blocks cost under them, kept by what they depend on.

A file's name is a hash of the program's fingerprint, the cluster, the degrees that labels were asked for and the
versions and source of what chose them. A file that cannot be read is passed over and written anew.
"""

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from autopar.cost_model.work.block_work import Family, from_plain, to_json
from autopar.cost_model.work.polynomials import Polynomial
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import AutoparError, Problem
from autopar.files.kept import keep, used, versions
from autopar.files.plain_data import read_plain
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import BlockLabels, Degrees, degrees_from, labels_from_dict, labels_to_dict
from autopar.ir.program import Program
from autopar.search.labels.result import Labelling

Chosen = tuple[Degrees, Labelling, ProgramWorks]
# values that are gathered for products are gathered again in backward; or kept, with the same labels; or kept, with
# labels chosen for it
AGAIN, KEPT, CHOSEN_FOR_KEPT = "gathered again", "kept", "kept, labels chosen so"
_READERS = {
    BlockLabels: labels_from_dict,
    Family[Polynomial]: from_plain,
    Degrees: degrees_from,
}


def labels_file(folder: Path, program: Program, cluster: ClusterSpec, wanted: Degrees, gathers: str = AGAIN) -> Path:
    """Where labels for `wanted` degrees are kept; `gathers` says how they were chosen and what blocks cost."""
    asked = [program.fingerprint, cluster.to_dict(), asdict(wanted), gathers, versions()]
    return folder / f"{hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:40]}.json"


def kept_labels(path: Path) -> Chosen | None:
    """What was kept there, if anything that can be read."""
    problems: list[Problem] = []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kinds: tuple[Any, ...] = (Degrees, Labelling, ProgramWorks)
        degrees, labelling, works = (
            read_plain(kind, data[kind.__name__], problems, readers=_READERS) for kind in kinds
        )
        used(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AutoparError):
        return None
    return None if problems else (degrees, labelling, works)


def keep_labels(path: Path, chosen: Chosen) -> None:
    """Keep labels for the next time."""
    degrees, labelling, works = chosen
    data = {
        "Degrees": asdict(degrees),
        "Labelling": _plain(labelling) | {"blocks": [labels_to_dict(block) for block in labelling.blocks]},
        "ProgramWorks": _plain(works) | {"family": json.loads(to_json(works.family))},
    }
    keep(path, json.dumps(data, separators=(",", ":")))  # blocks in their order


def _plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass but those that are written in another way."""
    names = [each.name for each in fields(value) if each.name not in ("blocks", "family")]
    return {name: _of(getattr(value, name)) for name in names}


def _of(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
