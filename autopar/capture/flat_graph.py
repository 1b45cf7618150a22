"""`Flat`: the graph that `torch.export` returns, before folding."""

from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.program import Decision, PartOf


@dataclass(frozen=True, eq=False, kw_only=True)
class Flat:
    """A captured graph. `placeholders` maps node names to ("parameter"|"buffer"|"input"|"lifted", name).

    The graph returns the outputs, then the new values of the buffers in `updates`. `parts` describes the parameters
    that are pieces of a parameter of the model (`autopar.capture.passes.packings`). `decisions` name the outputs
    with values that the model read. `notes` are facts about the capture for the user.
    """

    graph: fx.Graph
    placeholders: dict[str, tuple[str, str]]
    outputs: tuple[str, ...]
    root: fx.GraphModule
    updates: tuple[str, ...] = ()
    parts: dict[str, PartOf] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()  # the plain attributes that the model read

    def of_kind(self, kind: str) -> dict[str, str]:
        """The placeholders of one kind, with the model's names for them."""
        return {node: name for node, (found, name) in self.placeholders.items() if found == kind}


def literal_of(flat: Flat, node: fx.Node) -> torch.Tensor | None:
    """The tensor that the model's own code makes, if a node stands for one."""
    if node.op == "get_attr":
        return getattr(flat.root, str(node.target), None)
    kind, name = flat.placeholders.get(node.name, ("", ""))
    return getattr(flat.root, name.replace(".", "_"), None) if kind == "lifted" else None
