"""The fifth of the long tests, of the planted faults and of the cells of equivalence that CI runs for a commit."""

import zlib
from collections.abc import Iterable
from typing import TypeVar

FIFTHS = 5
T = TypeVar("T")


def is_in_fifth(name: str, commit: str) -> bool:
    """Whether a test is in the fifth that a commit's hash chooses. A new test moves no other one."""
    return zlib.crc32(name.encode()) % FIFTHS == int(commit, 16) % FIFTHS


def fifth_of(every: Iterable[T], commit: str) -> list[T]:
    """Each fifth one, beginning where a commit's hash says: neighbours, which cost alike, are in different fifths."""
    return list(every)[int(commit, 16) % FIFTHS :: FIFTHS]
