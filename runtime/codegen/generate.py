"""Code generation: a block and its labels become one rank's graph that sends, and draws from seeded streams."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.capture.analysis import Analysis
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block
from autopar.ir.sharding import Mesh
from autopar.lowering.local_graph import GATHER_LINEAR, KEPT_GATHER_LINEAR, NAMES, REWRITES, LocalGraph, local_graph
from autopar.runtime.codegen import conversions, vocabulary
from autopar.runtime.codegen.passes.random_streams import bind_streams
from autopar.runtime.codegen.passes.regather import gather_linear, kept_gather_linear

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    GATHER_LINEAR: gather_linear,
    KEPT_GATHER_LINEAR: kept_gather_linear,
    **{name: getattr(vocabulary, name) for name in REWRITES},
    **{name: getattr(conversions, name) for name in NAMES if hasattr(conversions, name)},
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Generated(LocalGraph):
    """A generated graph and, by attribute name, the mesh dimensions of the random streams that it reads."""

    streams: Mapping[str, tuple[str, ...]]


def generate(
    analysis: Analysis,
    block: Block,
    index: int,
    labels: BlockLabels,
    mesh: Mesh,
    *,
    device: str = "cpu",
    keep: Sequence[str] | None = None,
    regather: bool = False,
    fuse: bool = False,
    join: bool = True,
) -> Generated:
    """One rank's graph of a block that sends what it says; options are those of `local_graph`."""
    made = local_graph(
        analysis, block, index, labels, mesh, FUNCTIONS,
        device=device, keep=keep, regather=regather, fuse=fuse, join=join,
    )  # fmt: skip
    return Generated(
        graph=made.graph,
        mesh_dims=made.mesh_dims,
        streams=bind_streams(made.graph, mesh),
        ports=made.ports,
        results=made.results,
    )
