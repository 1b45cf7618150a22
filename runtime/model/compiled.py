"""A program compiled for one batch shape and mode: generated code per block, constants, and how to pad a batch."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx

from autopar.capture.analysis import Analysis, analyse
from autopar.capture.nodes import value_infos
from autopar.ir.plan import Plan
from autopar.ir.program import CallSite, Constants, Program
from autopar.ir.sharding import Type
from autopar.ir.stages import (
    How,
    Stage,
    kept_results,
    needed_results,
    offloaded_calls,
    recomputed_calls,
    stages_of,
    values_that_stay,
)
from autopar.ir.storage import Storage, boundary_types, storage_of
from autopar.lowering.local_graph import local_graph
from autopar.rules.rule import TensorInfo
from autopar.runtime.codegen.execute import constant_values, graph_module, module_attributes, use_running_statistics
from autopar.runtime.codegen.randomness import Streams
from autopar.runtime.distributed.mesh import RankMesh
from autopar.runtime.parameters.placement import same_layout, whole_placement

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledProgram:
    """A program, its plan, and the code and constants that are made of them at first use."""

    program: Program
    plan: Plan
    buffers: Callable[[str], torch.Tensor]  # whole values by name, the same tensor each time
    mesh: RankMesh
    streams: Streams
    device: torch.device
    stored: Mapping[str, Storage] = field(default_factory=dict)  # parameters that may lie in another placement
    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False)
    # of one version at most
    _constants: dict[tuple[int, ...], dict[str, torch.Tensor]] = field(default_factory=dict, init=False)

    @cached_property
    def analysis(self) -> Analysis:
        return analyse(self.program, self.plan.mesh)

    @cached_property
    def types(self) -> Mapping[str, tuple[Type, ...]]:
        return boundary_types(self.program, self.plan.blocks)

    @cached_property
    def placements(self) -> dict[str, Storage]:
        """How the plan stores every parameter."""
        outer, mesh = self.analysis.outer, self.plan.mesh
        taken = {name: storage_of(outer[name], self.types[name], mesh) for name in self.program.parameters}
        return taken | {name: whole_placement(info, mesh) for name, info in self.program.unused.items()}

    @cached_property
    def used(self) -> dict[str, Storage]:
        """The placement of parameters that this program takes in another placement than they are stored in."""
        names = [name for name in self.program.parameters if name in self.stored]
        return {n: self.placements[n] for n in names if not same_layout(self.placements[n], self.stored[n])}

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline stages of the program in order."""
        return stages_of(self.program, self.plan.cuts, self.plan.recomputed)

    @cached_property
    def recomputed(self) -> Mapping[int, How]:
        """How the backward pass repeats calls."""
        return recomputed_calls(self.program, self.plan.degrees, self.stages)

    @cached_property
    def offloaded(self) -> frozenset[int]:
        """The calls whose saved tensors wait on the host."""
        return offloaded_calls(self.program, self.plan.degrees, self.stages)

    @cached_property
    def stays(self) -> frozenset[str]:
        """The values that stay on the device although offloaded calls save them."""
        return values_that_stay(self.program, self.offloaded)

    def empty_values(self, names: Sequence[str], device: str) -> tuple[torch.Tensor, ...]:
        """Tensors without values, of this rank's shapes and the dtypes of named values."""
        infos, degrees, values = value_infos(self.program), self.plan.mesh.degrees, []
        for name in names:
            shape = self.analysis.outer[name].local_shape(self.types[name], degrees)
            value = torch.empty(shape, dtype=infos[name].dtype, device=device)
            values.append(value.requires_grad_(infos[name].differentiable))
        return tuple(values)

    @property
    def micro_batch(self) -> int:
        """Sequences of one data-parallel rank in one micro-batch."""
        infos = [i for i in self.program.inputs if i.batch_dim is not None]
        return infos[0].shape[infos[0].batch_dim or 0] // self.plan.degrees.dp if infos else 0

    def constants(self) -> dict[str, torch.Tensor]:
        """Values of the constant part, made again when a buffer that they are made of was written to."""
        infos = dict(buffers_read(self.program.constants))
        buffers = {name: self.buffers(name) for name in infos}
        versions = tuple(buffer._version for buffer in buffers.values())
        if versions not in self._constants:
            typed = {name: value.to(infos[name].dtype) for name, value in buffers.items()}
            self._constants.clear()
            self._constants[versions] = constant_values(self.program.constants, typed, str(self.device))
        return self._constants[versions]

    def code_modules(self, *, outputs: bool) -> list[fx.GraphModule]:
        """LocalGraph code per distinct block: the training program, or the one that keeps all outputs."""

        def make() -> list[fx.GraphModule]:
            wanted = needed_results(self.program, outputs=outputs)
            return [self._generated(i, keep, outputs) for i, keep in enumerate(wanted)]

        return self.once(("code", outputs), make)

    def partial_module(self, index: int, keep: tuple[str, ...]) -> fx.GraphModule:
        """LocalGraph code of a block for some of its outputs only; other ports may be given None."""
        return self.once(("partial code", index, keep), lambda: self._generated(index, keep, False))

    def once(self, key: tuple[Any, ...], make: Callable[[], _T]) -> _T:
        """What is made of the program at first use, and goes with it."""
        if key not in self._made:
            self._made[key] = make()
        held: _T = self._made[key]
        return held

    def _generated(self, index: int, keep: Sequence[str], outputs: bool) -> fx.GraphModule:
        generated = local_graph(
            self.analysis,
            self.program.blocks[index],
            index,
            self.plan.blocks[index],
            self.plan.mesh,
            device=str(self.device),
            keep=keep,
            regather=self.plan.regather,
            fuse=True,
            loss_chunks=self.plan.degrees.loss_chunks,
        )
        if outputs:
            use_running_statistics(generated.graph)
        return graph_module(generated.graph, f"Block{index}", module_attributes(generated, self.mesh, self.streams))

    def results_of(self, *, outputs: bool) -> Callable[[CallSite], Sequence[str]]:
        """Names of the values that the generated code of a call yields."""
        kept = needed_results(self.program, outputs=outputs)

        return lambda call: kept_results(self.program, call, kept[call.block])

    @torch.no_grad()
    def denominators(
        self, micro_batches: Sequence[Mapping[str, Any]], *, per_micro_batch: bool
    ) -> list[dict[str, torch.Tensor]]:
        """The denominators of each micro-batch by name: sums over all micro-batches, or its own. Ranks have summed."""
        modules, results = self.code_modules(outputs=False), self.results_of(outputs=False)

        def run(call: CallSite, values: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
            arguments = (values[a] if isinstance(a, str) else a for a in call.arguments)
            return dict(zip(results(call), modules[call.block](*arguments), strict=True))

        scopes = [{**self.constants(), **values} for values in micro_batches]
        return totals_of(self.program, scopes, run, per_micro_batch=per_micro_batch)


def buffers_read(constants: Constants) -> list[tuple[str, TensorInfo]]:
    """The buffers that the constant part of a program reads, and what it takes them as. Literals are no buffers."""
    nodes = (node for node in constants.graph.nodes if node.op == "placeholder")
    pairs = zip(constants.buffers, nodes, strict=True)
    return [(name, node.meta["info"]) for name, node in pairs if node.meta.get("literal") is None]


def totals_of(
    program: Program,
    micro_batches: Sequence[Mapping[str, Any]],
    run: Callable[[CallSite, Mapping[str, Any]], Mapping[str, torch.Tensor]],
    *,
    per_micro_batch: bool,
) -> list[dict[str, torch.Tensor]]:
    """The denominators of each micro-batch, level by level. `run` gives the results of a call in a micro-batch."""
    known_of: list[dict[str, torch.Tensor]] = [{} for _ in micro_batches]
    for call in program.calls:
        if call.phase == "denominator":
            results = [run(call, {**values, **known}) for values, known in zip(micro_batches, known_of, strict=True)]
            for name in call.results:
                every = [values[name] for values in results]
                totals = every if per_micro_batch else [torch.stack(every).sum(0)] * len(every)
                for known, total in zip(known_of, totals, strict=True):
                    known[name] = total
    return known_of


def readable(code: str) -> str:
    """Generated code without module prefixes and without the deletions that free memory early."""
    code = re.sub(r";  (\w+ = )+None(?=\n|$)", "", code)
    return re.sub(r"autopar_lowering_(?:functions|gather_linear|vocabulary|randomness)_", "", code).strip()
