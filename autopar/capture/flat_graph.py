"""`Flat`: the graph that `torch.export` returns, before folding; and the names of inputs and outputs of an export."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.state import named_state
from autopar.errors import CaptureError
from autopar.ir.program import Decision, PartOf

CHANGED = "buffer "  # an output of an export with this prefix is the new value of a buffer


@dataclass(frozen=True, eq=False, kw_only=True)
class Flat:
    """A captured graph, which returns the outputs, then the new values of the buffers in `updates`."""

    graph: fx.Graph
    placeholders: dict[str, tuple[str, str]]  # ("parameter"|"buffer"|"input"|"lifted", name) by the name of the node
    outputs: tuple[str, ...]
    root: fx.GraphModule
    updates: tuple[str, ...] = ()
    parts: dict[str, PartOf] = field(default_factory=dict)  # pieces of parameters (`autopar.capture.passes.packings`)
    decisions: tuple[Decision, ...] = ()  # outputs with values that the model read
    notes: tuple[str, ...] = ()  # about the capture, for the user
    reads: tuple[str, ...] = ()  # the plain attributes that the model read

    def of_kind(self, kind: str) -> dict[str, str]:
        """The placeholders of one kind, with the model's names for them."""
        return {node: name for node, (kind_of, name) in self.placeholders.items() if kind_of == kind}


def literal_of(flat: Flat, node: fx.Node) -> torch.Tensor | None:
    """The tensor that the model's own code makes, if a node stands for one."""
    if node.op == "get_attr":
        return getattr(flat.root, str(node.target), None)
    kind, name = flat.placeholders.get(node.name, ("", ""))
    return getattr(flat.root, name.replace(".", "_"), None) if kind == "lifted" else None


def exported_constants(exported: Any) -> dict[str, torch.Tensor]:
    """The constants of an exported program by name."""
    constants = {name: value for name, value in exported.constants.items() if isinstance(value, torch.Tensor)}
    return constants | {name: value for name, value in exported.state_dict.items() if name.startswith("loss_fn.")}


def all_outputs(exported: Any, placeholders: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """The names of a graph's outputs, in order. Changed buffers have a prefix."""
    names = map(str, exported.call_spec.out_spec.context or ())
    for spec in exported.graph_signature.output_specs:
        if spec.kind.name == "BUFFER_MUTATION" and not str(spec.target).startswith("loss_fn."):
            specs = exported.graph_signature.input_specs
            holder = next(s.arg.name for s in specs if s.kind.name == "BUFFER" and s.target == spec.target)
            yield f"{CHANGED}{placeholders[holder][1]}"
        else:
            yield next(names) if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT") else f"other {spec.target}"


def placeholders_of(model: nn.Module, exported: Any, inputs: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The kind and the name of each placeholder of an exported program. `inputs` are the names of its inputs."""
    tensors = [(name, tensor) for _, name, tensor in named_state(model)]
    first_name = {id(tensor): name for name, tensor in reversed(tensors)}
    canonical = {name: first_name[id(tensor)] for name, tensor in tensors}
    names = iter(inputs)
    placeholders: dict[str, tuple[str, str]] = {}
    for spec in exported.graph_signature.input_specs:
        node_name = getattr(spec.arg, "name", "")
        kind = spec.kind.name
        target = (spec.target or "").removeprefix("model.")
        if kind == "PARAMETER":
            placeholders[node_name] = ("parameter", canonical[target])
        elif kind == "BUFFER" and not target.startswith("loss_fn."):
            placeholders[node_name] = ("buffer", canonical.get(target, target))
        elif kind in ("CONSTANT_TENSOR", "BUFFER"):
            placeholders[node_name] = ("lifted", spec.target or "")
        elif kind == "USER_INPUT" and type(spec.arg).__name__ == "TensorArgument":
            placeholders[node_name] = ("input", next(names))
    return placeholders


def order_outputs(
    exported: Any, placeholders: Mapping[str, tuple[str, str]], dropped: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Order a graph's outputs: the model's, then new values of buffers. Returns both names; `dropped` are out."""
    graph: fx.Graph = exported.graph_module.graph
    values: Any = graph.output_node().args[0]
    outputs, updates = {}, {}
    for name, spec, node in zip(
        all_outputs(exported, placeholders), exported.graph_signature.output_specs, values, strict=True
    ):
        if name.startswith(dropped):
            continue
        if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT"):
            outputs[name] = node
        elif name.startswith(CHANGED):
            updates[name.removeprefix(CHANGED)] = node
        elif spec.kind.name != "USER_INPUT_MUTATION":
            raise CaptureError(
                f"the model changes {str(spec.target).removeprefix('model.')} in its forward pass; only buffers of the "
                "model may change there, so make it a buffer or change it outside"
            )
    graph.output_node().args = ((*outputs.values(), *updates.values()),)
    return tuple(outputs), tuple(updates)
