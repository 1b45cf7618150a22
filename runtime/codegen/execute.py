"""Execution of a program: the calls of its blocks in order, over named values."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import fx

from autopar.capture.passes.constants import with_device
from autopar.ir.program import CallSite, Constants, Program
from autopar.ir.sharding import Dims, Mesh
from autopar.lowering.local_graph import LocalGraph
from autopar.lowering.randomness import bind_streams, draws
from autopar.rules.operators import BATCH_STATISTIC
from autopar.runtime.codegen.randomness import Streams
from autopar.runtime.distributed.mesh import RankMesh

BlockFunction = Callable[..., tuple[Any, ...]]


def graph_module(graph: fx.Graph, name: str, attributes: Mapping[str, Any] | None = None) -> fx.GraphModule:
    """A module that runs a graph; `attributes` are what its `get_attr` nodes read."""
    root = torch.nn.Module()
    for key, value in (attributes or {}).items():
        setattr(root, key, value)
    return fx.GraphModule(root, graph, name)


def module_attributes(generated: LocalGraph, ranks: RankMesh, streams: Streams) -> dict[str, Any]:
    """What a generated graph reads from its module: mesh dimensions and random streams."""
    dims: dict[str, Any] = {name: ranks.dims[name] for name in generated.mesh_dims}
    return dims | {name: streams.of(use) for name, use in generated.streams.items()}


def captured_modules(program: Program, streams: Streams | None = None) -> tuple[fx.GraphModule, ...]:
    """The captured blocks as they are: the single-device reference. Random operators draw from `streams`, if given."""
    modules = []
    for block in program.blocks:
        graph, dims = _with_device(block.graph, "cpu"), dict[str, Dims]()
        for node in graph.nodes if streams is not None else ():
            if node.op == "call_function" and draws(node):
                node.meta["types"] = ()
                dims[node.name] = Dims.plain(node.meta["info"].shape)
        given = (
            {} if streams is None else {n: streams.of(use) for n, use in bind_streams(graph, Mesh.of(), dims).items()}
        )
        modules.append(graph_module(graph, "Captured", given))
    return tuple(modules)


def _with_device(graph: fx.Graph, device: str) -> fx.Graph:
    """A copy of a graph whose creating operators use a device."""
    copy = deepcopy(graph)
    for node in copy.nodes:
        if "device" in node.kwargs:
            node.kwargs = with_device(node.kwargs, device)
    return copy


def constant_values(constants: Constants, buffers: Mapping[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """Evaluate the constant part of a program on a device."""
    if not constants.results:
        return {}
    module = graph_module(_with_device(constants.graph, device), "Constants")
    nodes = (node for node in constants.graph.nodes if node.op == "placeholder")
    literals = [(name, node.meta.get("literal")) for name, node in zip(constants.buffers, nodes, strict=True)]
    with torch.no_grad():
        values = module(*((buffers[name] if value is None else value).to(device) for name, value in literals))
    return dict(zip(constants.results, values, strict=True))


def use_running_statistics(graph: fx.Graph) -> None:
    """For evaluation: replace every choice between a batch norm's statistic of the batch and the running one."""
    statistics = [node for node in graph.nodes if node.target is BATCH_STATISTIC]
    for node in statistics:
        node.replace_all_uses_with(node.args[1])
        graph.erase_node(node)
    if statistics:
        graph.eliminate_dead_code()


def run_calls(
    calls: Sequence[CallSite],
    function_of: Callable[[int, CallSite], BlockFunction],
    values: dict[str, Any],
    results_of: Callable[[CallSite], Sequence[str]],
) -> None:
    """Run calls in order; results join `values`."""
    for index, call in enumerate(calls):
        outputs = function_of(index, call)(*(values[a] if isinstance(a, str) else a for a in call.arguments))
        values.update(zip(results_of(call), outputs, strict=True))


def run_reference(
    program: Program,
    parameters: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    streams: Streams | None = None,
) -> dict[str, Any]:
    """All values of the captured program on the CPU; the loss is `values[program.loss]`."""
    modules = captured_modules(program, streams=streams)
    state = {name: buffers[name] for name in program.updates}
    values: dict[str, Any] = {**parameters, **state, **inputs, **constant_values(program.constants, buffers, "cpu")}

    def function_of(index: int, call: CallSite) -> BlockFunction:
        if streams is not None:
            streams.begin(0, 0, index)
        return modules[call.block]

    run_calls(program.calls, function_of, values, lambda call: call.results)
    return values
