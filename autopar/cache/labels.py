"""Labels of the models that autopar builds itself, and the costs of their blocks, kept by `autopar.cache.store`.

Labels depend on the program's fingerprint, the cluster, the degrees that they were asked for, and on all of autopar's
source.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.cache.store import SEARCHING, KeptFile, kept_file, versions
from autopar.cost_model.work.block_work import Family, from_plain, to_plain
from autopar.cost_model.work.polynomials import Polynomial
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import InputError, Problem
from autopar.files.plain_data import Reader, plain_of, read_plain
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees, degrees_from
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
    writers: dict[type, Reader] = {Type: str, Family: to_plain}
    data = {type(value).__name__: plain_of(value, writers) for value in chosen}
    return json.dumps(data, separators=(",", ":"))  # blocks in their order
