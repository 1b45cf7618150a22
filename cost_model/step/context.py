"""The shared inputs of all prices of a model: its shape and the machine."""

from dataclasses import dataclass

import numpy as np

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.step.layouts import Shape
from autopar.ir.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The inputs of all prices beside the numbers of the blocks."""

    shape: Shape
    machine: Machine

    @property
    def engine(self) -> Engine:
        """The engine of the machine."""
        return self.machine.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one rank in one micro-batch, by pass."""

    forward: Floats
    backward: Floats
    weight: Floats | float = 0.0  # the part of `backward` that makes gradients of weights: no other pass waits for it
    selective: Floats | float = 0.0  # of selective recomputation, which `backward` may have or not

    @property
    def both(self) -> Floats:
        total: Floats = self.forward + self.backward
        return total


def repeated_roles(shape: Shape) -> dict[str, Floats]:
    """Every repeated role that some layout has, and its share of the blocks."""
    return {role: count / shape.blocks for role, count in shape.counts if np.any(count > 0)}


def weighted(values: list[tuple[Floats, Floats]]) -> Floats:
    """The sum of values times their shares."""
    share, value = values[0]
    total = np.asarray(share * value)
    for share, value in values[1:]:
        total = total + share * value
    return total
