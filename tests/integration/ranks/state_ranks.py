"""Functions that ranks run in test_optimizer_state: the bytes and the files of an optimizer's state."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from offload_ranks import made, whole
from priced_models import Case

from autopar.ir.plan import Plan
from autopar.runtime.model.optimizers import optimizers_of
from autopar.runtime.offload.state_files import local_tensors


def held_state(rank: int, one: Case, plan: Plan, name: str) -> int:
    """Bytes of the state of an optimizer after a step."""
    model, parts = made(one, plan)
    own = optimizers_of(model, name, 1e-3)
    model.forward_backward(parts[0])
    for each in own:
        each.step()
    values = [v for each in own for state in each.state.values() for v in state.values()]
    return sum(num_bytes(tensor) for value in values for tensor in local_tensors(value))


def num_bytes(tensor: torch.Tensor) -> int:
    """Of a quantised tensor, the bytes of the tensors that make it up."""
    inner = getattr(tensor, "tensor_attrs", ())
    if inner:
        return sum(num_bytes(getattr(tensor, name)) for name in inner)
    return tensor.numel() * tensor.element_size()


def trained_in_files(
    rank: int, one: Case, plan: Plan, kind: str, options: dict[str, Any], in_files: bool
) -> tuple[dict[str, torch.Tensor], int, list[str]]:
    """Weights after three steps, one of them behind `load_state_dict`; the reserved bytes, and names in the folder."""
    model, parts = made(one, plan)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    with tempfile.TemporaryDirectory() as folder:
        size = model.keep_state_in_files(optimizer, folder) if in_files else 0
        names = [path.name for path in Path(folder).iterdir()]
        for part in (*parts, parts[0]):
            model.forward_backward(part)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
        return whole(model), size, names


def held_bytes(rank: int, one: Case, plan: Plan) -> tuple[int, int, int]:
    """Bytes of stored parameters, of gradients and of AdamW's moments after a step."""
    model, parts = made(one, plan)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.forward_backward(parts[0])
    stored = [parameter for _, parameter in model.stored_parameters()]
    gradients = [parameter.grad for parameter in stored if parameter.grad is not None]
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    parameters, of_gradients, moments = (
        sum(num_bytes(local) for value in values for local in local_tensors(value))
        for values in (stored, gradients, states)
    )
    return parameters, of_gradients, moments
