"""The decisions on one mesh dimension and their costs, as a network of variables and of values between them.

A variable has several choices, each with a cost: the variants of an operator, or the types of a boundary class. The
choice of a value's source decides the type in which it is made. The choices of its users decide the types in which it
is used. Each other wanted type costs one conversion, whatever the number of users. Each form that the backward pass
keeps costs memory once. `autopar.search.labels.elimination` finds the choices of least total cost. It leaves larger
networks to `autopar.search.labels.neighbourhoods` and `autopar.search.labels.milp`.
"""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

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
    """Costs of every variable's choices, and the values. Networks of the same numbers are equal."""

    costs: tuple[FloatArray, ...]
    values: tuple[NetworkValue, ...]

    @cached_property
    def digest(self) -> bytes:
        """The numbers of the network in few bytes."""
        digest = sha256()
        for costs in self.costs:
            _add(digest, costs)
        for value in self.values:
            arrays = (value.made, value.convert, value.forms, value.keep, value.regathered)
            _add(digest, np.array([value.source, len(value.uses)]), *arrays)
            for use in value.uses:
                _add(digest, np.array([use.variable, use.kept]), use.wanted)
        return digest.digest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Network) and self.digest == other.digest


def _add(digest: Any, *arrays: NDArray[Any]) -> None:
    for array in arrays:
        digest.update(repr(array.shape).encode())
        digest.update(array.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The choice of every variable, the total cost, and its relative gap to the proven bound, if one was proven."""

    choices: tuple[int, ...]
    objective: float
    gap: float | None
