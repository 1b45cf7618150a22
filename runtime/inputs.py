"""Batches at run time: names, shapes and dtypes checked against the plan before anything is sent."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.errors import RuntimeInputError, did_you_mean
from autopar.ir.plan import Degrees
from autopar.ir.program import InputInfo, Program


def expected_shape(info: InputInfo, degrees: Degrees, micro_batches: int) -> tuple[int, ...]:
    """Shape of this rank's part of an input over the given number of micro-batches."""
    shape = list(info.shape)
    if info.batch_dim is not None:
        shape[info.batch_dim] = shape[info.batch_dim] // degrees.dp * micro_batches
    return tuple(shape)


def local_inputs(
    program: Program,
    degrees: Degrees,
    batch: Mapping[str, Any] | Sequence[Any],
    device: torch.device,
    *,
    micro_batches: int | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a batch by input name, on the device. Raises `RuntimeInputError` listing every deviation."""
    infos = {info.name: info for info in program.inputs}
    given = dict(batch) if isinstance(batch, Mapping) else dict(zip(infos, batch, strict=False))
    problems: list[str] = []
    if not isinstance(batch, Mapping) and len(batch) != len(infos):
        problems.append(f"expected {len(infos)} tensors {tuple(infos)}, got {len(batch)}")
    for name in given:
        if name not in infos:
            problems.append(f"unknown input {name!r}; {did_you_mean(name, list(infos))}")
    found: dict[str, torch.Tensor] = {}
    for name, info in infos.items():
        value = given.get(name)
        if not isinstance(value, torch.Tensor):
            problems.append(f"input {name!r}: expected a tensor, got {type(value).__name__}")
            continue
        wanted = expected_shape(info, degrees, micro_batches or degrees.accumulate)
        if tuple(value.shape) != wanted:
            problems.append(
                f"input {name!r}: shape {tuple(value.shape)}, expected {wanted} "
                f"({degrees.accumulate if micro_batches is None else micro_batches} micro-batches of this rank)"
            )
        if value.dtype != info.dtype:
            problems.append(f"input {name!r}: dtype {value.dtype}, expected {info.dtype}; convert it with .to(...)")
        found[name] = value.to(device)
    if problems:
        raise RuntimeInputError("the batch does not fit the plan: " + "; ".join(problems))
    return found


def split_micro_batches(
    program: Program, inputs: Mapping[str, torch.Tensor], count: int
) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of equal shape, in order."""
    dims = {info.name: info.batch_dim for info in program.inputs}
    pieces = {
        name: [value] * count if dims[name] is None else list(value.chunk(count, dims[name] or 0))
        for name, value in inputs.items()
    }
    return [{name: piece[k] for name, piece in pieces.items()} for k in range(count)]
