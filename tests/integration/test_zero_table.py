"""The ZeRO table of docs/semantics.md: collectives of one profiled step on two data-parallel ranks, calls and elements.

With P elements in s groups (one per segment that holds parameters, one for the root's shared ones, S elements), n
micro-batches, and an all-reduce of x elements counted as 2x (it is a reduce-scatter and an all-gather):

    stage   all-gather         reduce-scatter   all-reduce    volume
    0       -                  -                P, 1 call     2P
    1       P, s calls         P, s calls       -             2P
    2       P, s calls         nP, ns calls     -             (n+1)P
    3       n(2P - S) elements nP, ns calls     -             3nP - nS
"""

import pytest
from integration_models import Wanted, planned
from suites import long

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.distributed.launch import Ranks

Counts = dict[str, tuple[int, int]]
SCALARS = 2  # all-reduces per micro-batch of one element each: the loss and its denominator


def groups(program: Program) -> tuple[list[int], int]:
    """Elements of every group that is gathered at once, and of the root's."""
    uses: dict[str, set[int]] = {}
    for index, call in enumerate(program.calls):
        for name in call.arguments:
            if isinstance(name, str) and name in program.parameters:
                uses.setdefault(name, set()).add(index)
    sizes: dict[int, int] = {}
    for name, where in uses.items():
        group = -1 if len(where) > 1 else min(where)
        sizes[group] = sizes.get(group, 0) + program.parameters[name].num_elements
    return list(sizes.values()), sizes.get(-1, 0)


def expected(program: Program, zero: int, n: int) -> Counts:
    sizes, shared = groups(program)
    total, num = sum(sizes), len(sizes)
    scalars = SCALARS * n
    if zero == 0:
        return {"all-reduce": (1 + scalars, total + scalars)}
    gathers = {1: (num, total), 2: (num, total), 3: (n * (2 * num - bool(shared)), n * (2 * total - shared))}
    scatters = {1: (num, total), 2: (n * num, n * total), 3: (n * num, n * total)}
    return {"all-gather": gathers[zero], "all-reduce": (scalars, scalars), "reduce-scatter": scatters[zero]}


def volume(counts: Counts, n: int) -> int:
    """Elements sent per rank and step, in units in which a gather of x elements is x; scalars are left out."""
    reduced = counts["all-reduce"][1] - SCALARS * n
    others = [counts[kind][1] for kind in ("all-gather", "reduce-scatter") if kind in counts]
    return 2 * reduced + sum(others)


@pytest.mark.parametrize("zero", (0, 1, 2, 3))
@pytest.mark.parametrize("spec, n", (long("llama3-8b", 1), long("llama3-8b", 3), ("gpt2", 3)))
def test_calls_and_elements(spec: str, zero: int, n: int, two_ranks: Ranks) -> None:
    wanted = Wanted(spec=spec, batch=6)
    program, plan = planned(wanted, 2, {"dp": 2, "zero": zero, "accumulate": n})
    assert isinstance(plan, Plan)
    found = two_ranks.run("integration_ranks:profiled_step", wanted, plan)
    assert found[0] == found[1] == expected(program, zero, n)
    total, shared = sum(p.num_elements for p in program.parameters.values()), groups(program)[1]
    wished = {0: 2 * total, 1: 2 * total, 2: (n + 1) * total, 3: 3 * n * total - n * shared}
    assert volume(found[0], n) == wished[zero]


def test_a_stage_is_called_with_tensors_alone(two_ranks: Ranks) -> None:
    """FSDP2 looks for tensors in all that a module is called with: no program may stand there."""
    wanted = Wanted(spec="gpt2", batch=4)
    _, plan = planned(wanted, 2, {"dp": 2, "zero": 3})
    for found in two_ranks.run("integration_ranks:stage_arguments", wanted, plan):
        assert found == [("Tensor", "dict", "function")]
