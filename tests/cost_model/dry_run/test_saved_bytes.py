"""Bytes saved for backward by a captured Megatron-like block, against closed forms.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4: per layer and for
16-bit values, with s sequence, b batch, h hidden, a heads, t tensor-parallel ranks and dropout masks of a byte

    one device                              sbh (34 + 5as/h)
    tensor parallel                         sbh (10 + 24/t + 5as/(ht))
    tensor parallel, sequence parallel      sbh (34/t + 5as/(ht))

The last needs regathering: else the gathered inputs of both products are saved, 2 (1 - 1/t) sbh more each.
"""

from functools import cache

import pytest
import torch
from tiny_models import Megatron

from autopar._torch import private
from autopar.capture.analysis import analyse
from autopar.capture.program import capture_program
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.lowering.local_graph import local_graph
from autopar.runtime.codegen.execute import graph_module, module_attributes
from autopar.runtime.codegen.randomness import Streams
from autopar.runtime.distributed.mesh import make_mesh
from autopar.search.labels.solve import label

SEQUENCE, BATCH, HIDDEN, HEADS = 256, 2, 512, 8
SBH = SEQUENCE * BATCH * HIDDEN
SCORES = 5 * HEADS * SEQUENCE / HIDDEN


@cache
def program() -> Program:
    with torch.device("meta"):
        model = Megatron(HIDDEN, HEADS).bfloat16()
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device="meta")
    return capture_program(model, {"input_ids": ids, "labels": ids.clone()})


def saved_bytes(tp: int, *, sequence_parallel: bool = False, regather: bool = False, fuse: bool = False) -> int:
    """Bytes of the distinct storages that rank 0's block saves for backward, its parameters left out."""
    degrees = Degrees(tp=tp, sequence_parallel=sequence_parallel)
    analysis = analyse(program(), degrees.mesh)
    labels = label(program(), analysis, degrees, ClusterSpec.preset("8xh100")).blocks
    index = next(i for i, b in enumerate(program().blocks) if b.name.startswith("layers"))
    block = program().blocks[index]
    generated = local_graph(analysis, block, index, labels[index], degrees.mesh, regather=regather, fuse=fuse)
    infos = {n.name: n.meta["info"] for n in block.graph.nodes if "info" in n.meta}
    arguments: dict[str, torch.Tensor] = {}
    for port in block.ports:
        shape = analysis.dims[index][port].local_shape(generated.ports[port], degrees.mesh.degrees)
        flows = port in block.differentiable_ports
        arguments[port] = torch.zeros(shape, dtype=infos[port].dtype, requires_grad=flows)
    weights = [arguments[port] for port, role in block.ports.items() if role == "parameter"]
    parameters = {weight.untyped_storage().data_ptr() for weight in weights}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in parameters:
            saved[storage] = tensor  # kept alive, so that no address is used twice
        return tensor

    with private.fake_world(tp):
        ranks = make_mesh(degrees.mesh)
        streams = Streams(ranks.dims, seed=0, device=torch.device("cpu"))
        module = graph_module(generated.graph, "Generated", module_attributes(generated, ranks, streams))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = module(*arguments.values())
    assert outputs[0].requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_one_device() -> None:
    assert saved_bytes(1) == pytest.approx(SBH * (34 + SCORES), rel=0.01)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel(tp: int) -> None:
    assert saved_bytes(tp) == pytest.approx(SBH * (10 + 24 / tp + SCORES / tp), rel=0.01)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_with_sequence_parallelism(tp: int) -> None:
    found = saved_bytes(tp, sequence_parallel=True, regather=True)
    assert found == pytest.approx(SBH * (34 + SCORES) / tp, rel=0.01)


@pytest.mark.parametrize("fuse", [False, True])
def test_without_regathering_both_gathered_inputs_are_saved(fuse: bool) -> None:
    found = saved_bytes(4, sequence_parallel=True, fuse=fuse)
    assert found == pytest.approx(SBH * ((34 + SCORES) / 4 + 2 * 2 * (1 - 1 / 4)), rel=0.01)
