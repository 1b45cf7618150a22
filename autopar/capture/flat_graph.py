"""`Flat`: the graph that `torch.export` gives, before normalisation and folding."""

from dataclasses import dataclass, field

from torch import fx

from autopar.ir.program import PartOf


@dataclass(frozen=True, eq=False, kw_only=True)
class Flat:
    """A captured graph before normalisation. `placeholders` maps node names to ("parameter"|"buffer"|"input", name).

    The graph returns the outputs, then the new values of the buffers in `updates`. `parts` says of names that are
    pieces of a parameter which (`autopar.capture.passes.packings`).
    """

    graph: fx.Graph
    placeholders: dict[str, tuple[str, str]]
    outputs: tuple[str, ...]
    root: fx.GraphModule
    updates: tuple[str, ...] = ()
    parts: dict[str, PartOf] = field(default_factory=dict)

    def of_kind(self, kind: str) -> dict[str, str]:
        """Placeholders of one kind and the names of what they stand for."""
        return {node: name for node, (found, name) in self.placeholders.items() if found == kind}
