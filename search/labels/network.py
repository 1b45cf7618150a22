"""The decisions on one mesh dimension and their costs, as a network of variables and of values between them.

A variable has several choices, each with a cost: the variants of an operator, or the types of a boundary class. The
choice of a value's source decides the type in which it is made. The choices of its users decide the types in which it
is used. Each other wanted type costs one conversion, whatever the number of users. Each form that the backward pass
keeps costs memory once. `autopar.search.labels.elimination` finds the choices of least total cost. It leaves larger
networks to `autopar.search.labels.neighbourhoods`.
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
class NetworkValue:
    """A value between variables; its types are numbers."""

    source: int
    made: IntArray
    uses: tuple[Use, ...]
    convert: FloatArray  # [made, wanted]: the cost of a conversion, infinite if there is none
    forms: IntArray
    keep: FloatArray  # by form: the cost of a kept use
    regathered: BoolArray  # [made, wanted]: gathered again, so a kept use costs nothing


@dataclass(frozen=True, eq=False, kw_only=True)
class Network:
    """Costs of every variable's choices, and the values."""

    costs: tuple[FloatArray, ...]
    values: tuple[NetworkValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The choice of every variable, the total cost, and its relative gap to the proven bound, if one was proven."""

    choices: tuple[int, ...]
    objective: float
    gap: float | None
