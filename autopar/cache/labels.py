"""Labels of the models that autopar builds itself, and the costs of their blocks, kept by `autopar.cache.store`.

Labels depend on the program's fingerprint, the cluster, the degrees that they were asked for, and on all of autopar's
source.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from autopar.cache.store import SEARCHING, KeptFile, kept_file, versions
from autopar.cost_model.work.block_work import Family, from_plain, to_json
from autopar.cost_model.work.polynomials import Polynomial
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import InputError, Problem
from autopar.files.plain_data import Reader, read_plain
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.plan import labels_to_dict
from autopar.ir.program import Program
from autopar.ir.sharding import Type
from autopar.search.labels.result import Labelling

LabelledWorks = tuple[Degrees, Labelling, ProgramWorks]
# values that are gathered for products are gathered again in backward; or kept, with the same labels; or kept, with
# labels chosen for it
AGAIN, KEPT, CHOSEN_FOR_KEPT = "gathered again", "kept", "kept, labels chosen so"
_READERS: dict[Any, Reader] = {
    Family[Polynomial]: from_plain,
    Degrees: degrees_from,
    Type: Type.parse,
}


def labels_file(
    folder: Path, program: Program, cluster: ClusterSpec, wanted: Degrees, gathers: str = AGAIN
) -> KeptFile:
    """The file of labels for `wanted` degrees; `gathers` is `AGAIN`, `KEPT` or `CHOSEN_FOR_KEPT`."""
    inputs = (program.fingerprint, cluster.to_dict(), asdict(wanted), gathers, versions(SEARCHING))
    return kept_file(folder, "labels", *inputs)


def read_labels(path: Path) -> LabelledWorks:
    """The labels of a file. Raises `InputError`, or `KeyError` or `TypeError` for a file of another kind."""
    problems: list[Problem] = []
    data = json.loads(path.read_text(encoding="utf-8"))
    kinds: tuple[Any, ...] = (Degrees, Labelling, ProgramWorks)
    degrees, labelling, works = (read_plain(kind, data[kind.__name__], problems, readers=_READERS) for kind in kinds)
    if problems:
        raise InputError(f"{path} holds no labels", problems)
    return degrees, labelling, works


def labels_text(chosen: LabelledWorks) -> str:
    """The content of a file of labels."""
    degrees, labelling, works = chosen
    data = {
        "Degrees": asdict(degrees),
        "Labelling": _plain(labelling) | {"blocks": [labels_to_dict(block) for block in labelling.blocks]},
        "ProgramWorks": _plain(works) | {"family": json.loads(to_json(works.family))},
    }
    return json.dumps(data, separators=(",", ":"))  # blocks in their order


def _plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, without the fields that are written in another way."""
    names = [each.name for each in fields(value) if each.name not in ("blocks", "family")]
    return {name: _of(getattr(value, name)) for name in names}


def _of(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _of(v) for key, v in value.items()}
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
