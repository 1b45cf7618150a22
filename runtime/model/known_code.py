"""The code of a step, cut to the values that depend on inputs and constants only, such as indices and decisions.

All ranks run it before a step. It has the collectives that make a value of the whole batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.capture.lookups import Lookup
from autopar.capture.nodes import closure, output_nodes
from autopar.ir.program import CallSite
from autopar.lowering.local_graph import local_graph
from autopar.lowering.recomputation import graph_of
from autopar.runtime.codegen.execute import graph_module
from autopar.runtime.model.compiled import CompiledProgram

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


def call_parts(
    compiled: CompiledProgram, lookups: Sequence[Lookup] = (), results: Collection[str] = ()
) -> list[CallPart]:
    """The code that computes the indices of lookups and some results, call by call."""
    wanted = set(results)
    parts = []
    for index, call in reversed(list(enumerate(compiled.program.calls))):
        reads = tuple(lookup for lookup in lookups if lookup.call == index)
        gives = tuple(result for result in call.results if result in wanted)
        if reads or gives:
            parts.append(_part(compiled, call, reads, gives))
            wanted |= parts[-1].arguments
    return parts[::-1]


def _part(compiled: CompiledProgram, call: CallSite, lookups: tuple[Lookup, ...], results: tuple[str, ...]) -> CallPart:
    program, plan, index = compiled.program, compiled.plan, call.block
    given = compiled.analysis, program.blocks[index], index, plan.blocks[index], plan.mesh
    generated = compiled.once(("known code", index), lambda: local_graph(*given, device=str(compiled.device)))
    by_result = dict(zip(call.results, output_nodes(generated.graph), strict=True))
    nodes = [by_result[name] for name in results]
    nodes += [generated.operands[lookup.node.name, lookup.index.name] for lookup in lookups]
    needed = [node for node in closure(nodes) if node.op == "call_function"]
    graph, names = graph_of(needed, list(generated.graph.find_nodes(op="placeholder")), nodes)
    module = graph_module(graph, f"Known{index}", {name: compiled.mesh.dims[name] for name in names})
    return CallPart(call=call, module=module, results=results, lookups=lookups)
