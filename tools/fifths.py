"""The fifth of the long tests, of the planted faults and of the cells of equivalence that CI runs for a commit."""

import zlib
from collections.abc import Mapping

FIFTHS = 5


def is_fifth(number: int, commit: str) -> bool:
    """Whether a commit's hash chooses the fifth of a number."""
    return number % FIFTHS == int(commit, 16) % FIFTHS


def is_in_fifth(name: str, commit: str) -> bool:
    """Whether a test or a fault is in the fifth that a commit's hash chooses. A new one moves no other."""
    return is_fifth(zlib.crc32(name.encode()), commit)


def balanced(costs: Mapping[str, float], num_parts: int) -> dict[str, int]:
    """The part of each name, so that all parts cost about the same: the dearest first, into the cheapest part."""
    found, sums = dict[str, int](), [0.0] * num_parts
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        found[name] = sums.index(min(sums))
        sums[found[name]] += costs[name]
    return found
