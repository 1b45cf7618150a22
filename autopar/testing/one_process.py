"""One-process equivalence: all ranks of a generated program in this process, forward and backward, float64.

No process is started, so every rule, block, mesh and odd degree can be checked in seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar._torch import private
from autopar.capture.analysis import Analysis
from autopar.ir.plan import BlockLabels
from autopar.ir.program import CallSite, Program
from autopar.ir.sharding import Mesh
from autopar.ir.stages import kept_results, needed_results
from autopar.ir.storage import boundary_types
from autopar.lowering.local_graph import LocalGraph, local_graph
from autopar.lowering.recomputation import SelectiveBlock
from autopar.runtime.codegen.execute import (
    BlockFunction,
    constant_values,
    graph_module,
    module_attributes,
    run_calls,
)
from autopar.runtime.distributed.mesh import make_mesh
from autopar.runtime.parameters.shards import all_shards, assemble
from autopar.runtime.verify.shared_draws import SharedDraws


@dataclass(frozen=True, eq=False, kw_only=True)
class RunOutcome:
    """Loss, gradients, outputs and new values of buffers made whole, and the largest difference among equal copies."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    updates: Mapping[str, torch.Tensor]
    disagreement: float


def generate_all(
    program: Program,
    analysis: Analysis,
    labels: Sequence[BlockLabels],
    mesh: Mesh,
    *,
    outputs: bool = True,
    **options: Any,
) -> list[LocalGraph]:
    """The graphs of all blocks. Without `outputs` they compute what training needs, as in a step."""
    kept = [block.outputs for block in program.blocks] if outputs else needed_results(program)
    return [
        local_graph(analysis, block, i, labels[i], mesh, keep=kept[i], **options)
        for i, block in enumerate(program.blocks)
    ]


def run_in_one_process(
    program: Program,
    analysis: Analysis,
    labels: Sequence[BlockLabels],
    mesh: Mesh,
    parameters: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    *,
    generated: Sequence[LocalGraph] | None = None,
    outputs: bool = True,
    **options: Any,
) -> RunOutcome:
    """Run loss and backward of the generated program, or of `generated` blocks, on all ranks in this process."""
    types = boundary_types(program, labels)
    state = {name: buffers[name] for name in program.updates}
    whole = {**parameters, **state, **inputs, **constant_values(program.constants, buffers, "cpu")}
    blocks = generated or generate_all(program, analysis, labels, mesh, outputs=outputs, **options)
    kept = [block.results for block in blocks]
    with private.one_process_ranks(mesh.size):
        ranks = make_mesh(mesh)
        streams = SharedDraws(mesh, ranks.dims)
        modules: list[BlockFunction] = []
        for block, own in zip(blocks, labels, strict=True):
            module = graph_module(block.graph, "Generated", module_attributes(block, ranks, streams))
            modules.append(SelectiveBlock(module, own.recomputed) if own.recomputed else module)
        values: dict[str, Any] = {}
        for name, kinds in types.items():
            if name in whole:
                held = all_shards(whole[name].detach(), analysis.outer[name], kinds, mesh)
                values[name] = private.from_ranks(held)
                if name in parameters:
                    values[name].requires_grad_(program.parameters[name].requires_grad)

        def function_of(index: int, call: CallSite) -> BlockFunction:
            streams.begin(0, 0, index)
            return modules[call.block]

        run_calls(program.calls, function_of, values, lambda call: kept_results(program, call, kept[call.block]))
        values[program.loss].backward()
        grads = {n: values[n].grad for n in parameters if n in values and values[n].grad is not None}
    worst = 0.0
    gradients: dict[str, torch.Tensor] = {}
    for name, grad in grads.items():
        held = private.to_ranks(grad, mesh.size)
        gradients[name], apart = assemble(held, analysis.outer[name], types[name], mesh, cotangent=True)
        worst = max(worst, apart)

    def made_whole(name: str) -> torch.Tensor:
        nonlocal worst
        if name in whole:  # a constant
            return whole[name]
        held = [t.detach() for t in private.to_ranks(values[name], mesh.size)]
        tensor, apart = assemble(held, analysis.outer[name], types[name], mesh)
        worst = max(worst, apart)
        return tensor

    found = {key: made_whole(name) for key, name in program.outputs.items()} if outputs else {}
    updates = {buffer: made_whole(name) for buffer, name in program.updates.items()}
    loss = made_whole(program.loss)
    return RunOutcome(loss=loss, gradients=gradients, outputs=found, updates=updates, disagreement=worst)
