"""The two mesh dimensions that `cp` becomes if it divides no heads, but a factor of it does.

The second one then splits heads, and the first one queries: its ranks gather keys, or keys travel in a ring (Fang and
Zhao 2024, "USP: a unified sequence parallelism approach for long context generative AI", section 3). The ranks that
exchange heads are neighbours.
"""

from math import gcd

from autopar.capture.analysis import Analysis
from autopar.ir.program import Program
from autopar.search.labels.choices import ATTENTION


def context_dims(program: Program, analysis: Analysis, cp: int, tp: int) -> tuple[int, int] | None:
    """The two degrees whose product is `cp`, the second of which divides the key heads that `tp` leaves on a rank."""
    common = gcd(cp, heads_left(program, analysis, tp))
    return (cp // common, common) if 1 < common < cp else None


def heads_left(program: Program, analysis: Analysis, tp: int) -> int:
    """The key heads of a rank that every attention has, as a number that a degree must divide; 0 without attention."""
    common = 0
    for index, calls in enumerate(analysis.calls):
        for name, call in calls.items():
            if call.target is ATTENTION and len(call.operands[1].shape) > 2:
                heads = analysis.bounds[index][name].operands[1].sizes[-3]
                common = gcd(common, heads[0] // gcd(heads[0], tp) if heads else 1)
    return common
