"""What layouts of one model are priced with, beside the numbers of its blocks."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.machine.fitted_constants import Mechanisms
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.step.layouts import Shape
from autopar.cost_model.step.unique_rows import spread
from autopar.ir.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """`in_float8`: products of repeated blocks are computed in float8; `fused`: attention is one kernel."""

    shape: Shape
    machine: Machine
    engine: Engine
    mechanisms: Mechanisms
    in_float8: bool
    fused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one rank's share of something in one micro-batch; `weight` is the part of `backward` whose results
    no other pass waits for."""

    forward: Floats
    backward: Floats
    weight: Floats | float = 0.0

    def at(self, index: Any) -> "Passes":
        """The seconds of an index, without `weight`."""
        return Passes(forward=spread(self.forward, index), backward=spread(self.backward, index))

    @property
    def both(self) -> Floats:
        found: Floats = self.forward + self.backward
        return found


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
