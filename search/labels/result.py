"""The result of the labeller (`autopar.search.labels.solve`)."""

from dataclasses import dataclass

from autopar.ir.plan import BlockLabels
from autopar.ir.sharding import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """Labels of every distinct block, and how good they are.

    `objective` has an entry for each solved mesh dimension. Its unit is the largest all-reduce between blocks, at the
    reference workload. `gap` is the largest relative gap to a proven bound, None if a mesh dimension has no such bound.
    `notes` name the operators that stay whole and the scale of the prices.
    """

    mesh: Mesh
    blocks: tuple[BlockLabels, ...]
    objective: dict[str, float]
    gap: float | None
    added_work: float  # of a rank, relative to an even share of the products: operators whose axes do not divide
    notes: tuple[str, ...]
