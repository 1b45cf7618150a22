"""Comparison of the axes that a block's dimensions share at different sizes."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.program import Block, Program


def with_note_on_axes(program: Program, axes: Sequence[str]) -> Program:
    """The program, with a note if its blocks share other axes than `axes`, the `axes_of` blocks at other sizes."""
    differing = [b.name for b, other in zip(program.blocks, axes, strict=False) if axes_of(b) != other]
    if not differing and len(program.blocks) == len(axes):
        return program
    note = (
        f"axes of {differing or 'the blocks'} depend on the captured sizes, because some dimensions are equal by chance"
    )
    return replace(program, notes=(*program.notes, note))


def axes_of(block: Block) -> str:
    """The hash of the axes that a block's dimensions share, without sizes. Axes are numbered by first appearance."""
    numbers: dict[int, int] = {}
    pattern = [
        (name, [[numbers.setdefault(a, len(numbers)) for a in dim] for dim in dims.axes])
        for name, dims in block.dims.items()
    ]
    return hashlib.sha256(repr(pattern).encode()).hexdigest()
