"""The fifth of the long tests, of the planted faults and of the tables of equivalence that CI runs for a commit."""

import zlib

FIFTHS = 5


def is_in_fifth(name: str, commit: str) -> bool:
    """Whether a test, a fault or a row is in the fifth that a commit's hash chooses."""
    return zlib.crc32(name.encode()) % FIFTHS == int(commit, 16) % FIFTHS
