"""What is to be decided on one mesh dimension, and what it costs: a network of variables and the values between them.

A variable has so many choices, each with a cost of its own: an operator its variants, a boundary class its types. A
value is made in one type, which the choice of its source says, and used in others, which the choices of its users say.
It costs a conversion for every other type that is wanted, once for all that want it, and what the backward pass keeps
of it, once per form. The best choices are those of least cost in all; two exact methods find them
(`autopar.search.labels.elimination`, `autopar.search.labels.milp`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a value: the type that every choice of a variable wants, and whether the backward pass needs it."""

    variable: int
    wanted: IntArray
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value between variables; its types are numbers.

    `convert[made, wanted]` is the cost of a conversion, infinite where there is none. A kept use costs `keep[form]` of
    the `forms` of its type, but not where `regathered[made, wanted]` says that it is gathered again.
    """

    source: int
    made: IntArray
    uses: tuple[Use, ...]
    convert: FloatArray
    forms: IntArray
    keep: FloatArray
    regathered: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Costs of every variable's choices, and the values."""

    costs: tuple[FloatArray, ...]
    values: tuple[Value, ...]

    @property
    def num_choices(self) -> int:
        return sum(len(costs) for costs in self.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The choice of every variable, the cost of all, and its relative gap to the proven bound."""

    choices: tuple[int, ...]
    objective: float
    gap: float
