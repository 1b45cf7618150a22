"""The code of a step, cut to the values that depend on inputs and constants only, such as indices and decisions.

All ranks run it before a step. It has the collectives that make a value of the whole batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.analysis import Analysis
from autopar.capture.lookups import Lookup
from autopar.capture.nodes import closure
from autopar.ir.plan import Plan
from autopar.ir.program import CallSite, Program
from autopar.lowering.local_graph import LocalGraph, local_graph
from autopar.runtime.codegen.execute import graph_module
from autopar.runtime.distributed.mesh import RankMesh

BatchValues = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """A call of a block, cut to some of its results, and to the indices of some lookups."""

    call: CallSite
    module: fx.GraphModule
    results: tuple[str, ...]
    lookups: tuple[Lookup, ...]

    def run(self, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Add the results to `values`. Returns the indices."""
        results = self.module(*(values.get(a) if isinstance(a, str) else a for a in self.call.arguments))
        values.update(zip(self.results, results, strict=False))
        return list(results[len(self.results) :])

    @property
    def arguments(self) -> set[str]:
        """The names of the values that the part reads."""
        ports = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        pairs = zip(ports, self.call.arguments, strict=True)
        return {argument for port, argument in pairs if port.users and isinstance(argument, str)}


class KnownCode:
    """The blocks of one program in the code of one plan."""

    def __init__(self, program: Program, analysis: Analysis, plan: Plan, mesh: RankMesh, device: torch.device) -> None:
        self.program, self._analysis, self.plan = program, analysis, plan
        self._mesh, self.device = mesh, device
        self._generated: dict[int, LocalGraph] = {}

    def parts(self, lookups: Sequence[Lookup] = (), results: Collection[str] = ()) -> list[CallPart]:
        """The code that computes the indices of lookups and some results, call by call."""
        wanted = set(results)
        parts = []
        for index, call in reversed(list(enumerate(self.program.calls))):
            reads = tuple(lookup for lookup in lookups if lookup.call == index)
            gives = tuple(result for result in call.results if result in wanted)
            if reads or gives:
                parts.append(self._part(call, reads, gives))
                wanted |= parts[-1].arguments
        return parts[::-1]

    def _part(self, call: CallSite, lookups: tuple[Lookup, ...], results: tuple[str, ...]) -> CallPart:
        block = self.program.blocks[call.block]
        if call.block not in self._generated:
            labels, plan = self.plan.blocks[call.block], self.plan
            self._generated[call.block] = local_graph(
                self._analysis, block, call.block, labels, plan.mesh, device=str(self.device)
            )
        generated = self._generated[call.block]
        outputs: Any = generated.graph.output_node().args[0]
        by_result = dict(zip(call.results, outputs, strict=True))
        nodes = [by_result[name] for name in results]
        nodes += [generated.operands[lookup.node.name, lookup.index.name] for lookup in lookups]
        dims = {name: self._mesh.dims[name] for name in generated.mesh_dims}
        module = graph_module(_cut(generated.graph, nodes), f"Known{call.block}", dims)
        return CallPart(call=call, module=module, results=results, lookups=lookups)


def _cut(graph: fx.Graph, outputs: Sequence[fx.Node]) -> fx.Graph:
    """The part of a graph that computes the outputs. It has all placeholders."""
    kept = set(closure(outputs))
    cut, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder" or node in kept:
            copies[node] = cut.node_copy(node, copies.__getitem__)
    cut.output(tuple(copies[node] for node in outputs))
    return cut
