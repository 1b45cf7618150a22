"""What a search for labels found; `autopar.search.labels.solve` says how."""

from dataclasses import dataclass

from autopar.ir.plan import BlockLabels
from autopar.ir.sharding import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """Labels of every distinct block, and how good they are.

    `objective` (in units of the largest all-reduce between blocks, at the reference workload) and `size` (choices and
    values) are per mesh dimension solved; `gap` is the largest relative gap to a proven bound; `notes` say what stayed
    whole and how prices were scaled.
    """

    mesh: Mesh
    blocks: tuple[BlockLabels, ...]
    objective: dict[str, float]
    size: dict[str, tuple[int, int]]
    gap: float
    added_work: float  # of a rank, relative to an even share of the products: operators whose axes do not divide
    notes: tuple[str, ...]
    seconds: float
