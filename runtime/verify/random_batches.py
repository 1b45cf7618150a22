"""Seeded random batches of a program: every input within the bounds of the operators that read it."""

from collections.abc import Iterator, Mapping
from math import inf, prod

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.input_ranges import input_ranges
from autopar.capture.nodes import operator_name, shape
from autopar.capture.request import resized
from autopar.capture.value_range import ValueRange
from autopar.ir.degrees import Degrees
from autopar.ir.program import InputInfo, Program

# Values of an integer input that no operator bounds: positive, because lengths and divisors must not be zero.
_FREE_VALUES = 8
_SORTED = {"bucketize": 1, "searchsorted": 0}  # the operand that must be sorted
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def random_batches(
    program: Program,
    degrees: Degrees,
    steps: int,
    seed: int,
    given: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Seeded global batches. `given` values are not drawn; `constants` narrow indices. Raises `InputError`."""
    ranges = input_ranges(program, _ends(constants))
    generator = torch.Generator().manual_seed(seed)
    count, held = degrees.num_micro_batches, given or {}
    fixed = {i.name: resized(held[i.name], _shape(i, count)).to(i.dtype) for i in program.inputs if i.name in held}
    fixed |= {name: fixed[name].sort(-1).values for name in sorted_inputs(program) & fixed.keys()}
    return [
        {info.name: _drawn(info, ranges, count, generator) for info in program.inputs} | fixed for _ in range(steps)
    ]


def values_that_decide(program: Program, example: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The example values of all inputs that decided a branch during capture: other values may decide otherwise."""
    deciding = {name for decision in program.decisions for name in decision.inputs}
    return {name: example[name] for name in sorted(deciding | sorted_inputs(program))}


def sorted_inputs(program: Program) -> set[str]:
    """The inputs that an operator takes as a sorted sequence, whole or in part."""
    sorted_values: set[str] = set()
    for call in reversed(program.calls):
        block = program.blocks[call.block]
        named = dict(zip(block.ports, call.arguments, strict=True))
        sorted_names = {out for out, result in zip(block.outputs, call.results, strict=True) if result in sorted_values}
        for node in block.graph.nodes:
            place = _SORTED.get(operator_name(node)) if node.op == "call_function" else None
            source = node if node.name in sorted_names else None if place is None else node.args[place]
            while isinstance(source, fx.Node) and source.op == "call_function" and source.all_input_nodes:
                source = source.all_input_nodes[0]
            name = named.get(source.name) if isinstance(source, fx.Node) else None
            sorted_values |= {name} if isinstance(name, str) else set()
    return sorted_values & {info.name for info in program.inputs}


def notes_on_inputs(program: Program, constants: Mapping[str, torch.Tensor] | None = None) -> tuple[str, ...]:
    """One sentence for each input that decides a branch, and for each integer input that no operator bounds."""
    notes = []
    deciding = {name: decision.line for decision in program.decisions for name in decision.inputs}
    are_sorted = sorted_inputs(program)
    for info in program.inputs:
        if info.name in are_sorted:
            notes.append(f"the input {info.name!r} has the values of the example inputs, because it must be sorted")
            continue
        if info.name in deciding:
            notes.append(
                f"the input {info.name!r} has the values of the example inputs in every step, because it decides a "
                f"branch ({deciding[info.name]})"
            )
            continue
        bounds = input_ranges(program, _ends(constants)).get(info.name)
        if bounds is not None and not bounds.is_bounded:
            low, high = _interval(bounds, info.dtype)
            drawn = "it is 1 everywhere" if _is_mask(info, bounds) else f"it is drawn from {low} to {high - 1}"
            notes.append(f"no operator bounds the integer input {info.name!r}: {drawn}")
    return (*notes, *_notes_on_parts(program))


def _notes_on_parts(program: Program) -> Iterator[str]:
    """One sentence for the first operator that takes some rows of the batch, such as `chunk`."""
    for call in program.calls:
        block = program.blocks[call.block]
        for node in block.graph.nodes:
            if node.target not in (aten.slice.Tensor, aten.reshape.default):
                continue
            rows, parts = shape(node.args[0])[:1], shape(node)[:2]
            axes = block.dims[node.args[0].name].axes[:1]
            takes = node.target is aten.slice.Tensor or (parts[:1] != (1,) and prod(parts) == prod(rows))
            if takes and parts[:1] != rows and any(not program.batch_axes.isdisjoint(dim) for dim in axes):
                yield (
                    f"{call.path} takes parts of the batch ({node.target}): its rows belong together, and they are the "
                    "rows of the global batch; a rank's own pairs must be rows of one sample"
                )
                return


def _ends(constants: Mapping[str, torch.Tensor] | None) -> dict[str, tuple[float, float]]:
    """The least and the largest element of every tensor of integers."""
    integers = {n: t for n, t in (constants or {}).items() if t.numel() and t.dtype in _INTEGERS}
    return {name: (int(tensor.min()), int(tensor.max())) for name, tensor in integers.items()}


def _drawn(
    info: InputInfo, ranges: Mapping[str, ValueRange], num_micro_batches: int, generator: torch.Generator
) -> torch.Tensor:
    shape = _shape(info, num_micro_batches)
    allowed = ranges.get(info.name, ValueRange())
    if info.dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128).to(info.dtype)
    if info.dtype.is_floating_point:
        if allowed.is_bounded:  # an index or a probability that is no integer
            return torch.randint(*_interval(allowed, torch.int64), shape, generator=generator).to(info.dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(info.dtype)
    if info.dtype is torch.bool or _is_mask(info, allowed):
        return torch.ones(shape, dtype=info.dtype)
    low, high = _interval(allowed, info.dtype)
    values = torch.randint(low, high, shape, generator=generator, dtype=info.dtype)
    ignored = next((value for value in sorted(allowed.ignored) if allowed.allows(value)), None)
    if ignored is None or len(shape) < 2:
        return values
    lengths = torch.randint(1, shape[1] + 1, (shape[0],), generator=generator)
    lengths[0] = shape[1]
    behind = torch.arange(shape[1]) >= lengths.unsqueeze(1)
    return values.masked_fill(behind.reshape(*shape[:2], *(1 for _ in shape[2:])), ignored)


def _shape(info: InputInfo, num_micro_batches: int) -> tuple[int, ...]:
    return tuple(size * (num_micro_batches if dim == info.batch_dim else 1) for dim, size in enumerate(info.shape))


def _is_mask(info: InputInfo, allowed: ValueRange) -> bool:
    """An integer mask cannot be told from other integers on the graph, so its name decides."""
    return "mask" in info.name and not allowed.is_bounded and allowed.allows(1)


def _interval(allowed: ValueRange, dtype: torch.dtype) -> tuple[int, int]:
    """The values to draw from: from 0 on if they are bounded above, otherwise a few positive ones."""
    if allowed.high != inf:
        high = int(allowed.high)
        low = int(max(allowed.low, 0 if high > 0 else high - _FREE_VALUES))
    else:
        low = int(max(allowed.low, 1))
        high = low + _FREE_VALUES
    return low, min(high, torch.iinfo(dtype).max + 1)
