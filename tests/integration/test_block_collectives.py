"""Collectives of one decoder block under tensor parallelism: on the generated program, and in a profiled step."""

from collections import Counter

import pytest
from integration_models import Wanted, planned
from suites import long

from autopar.capture.analysis import analyse
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.lowering import functions
from autopar.lowering.gather_linear import gather_linear, kept_gather_linear
from autopar.lowering.local_graph import local_graph
from autopar.runtime.distributed.launch import Ranks

# (forward, backward) collectives of what generated code calls: the table of docs/semantics.md
SENDS = {
    functions.invariant_to_replicate: ((), ("all-reduce",)),
    functions.all_reduce_to_invariant: (("all-reduce",), ()),
    functions.all_reduce_to_replicate: (("all-reduce",), ("all-reduce",)),
    functions.reduce_scatter: (("reduce-scatter",), ("all-gather",)),
    functions.all_gather_to_replicate: (("all-gather",), ("reduce-scatter",)),
    functions.all_gather_to_invariant: (("all-gather",), ()),
    functions.shard_of_invariant: ((), ("all-gather",)),
    functions.all_to_all: (("all-to-all",), ("all-to-all",)),
    gather_linear: (("all-gather",), ("reduce-scatter", "all-gather")),
    kept_gather_linear: (("all-gather",), ("reduce-scatter",)),
}
WITHOUT = {"all-reduce": (2, 2)}
WITH = {"all-gather": (2, 2), "reduce-scatter": (2, 2)}
WITH_REGATHER = {"all-gather": (2, 4), "reduce-scatter": (2, 2)}


def in_code(program: Program, plan: Plan, regather: bool) -> dict[str, tuple[int, int]]:
    """Collectives of the block that is called once per layer, forward and backward."""
    index = max(range(len(program.blocks)), key=lambda i: len(program.uses_of_block(i)))
    generated = local_graph(
        analyse(program, plan.mesh), program.blocks[index], index, plan.blocks[index], plan.mesh, regather=regather
    )
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for node in generated.graph.nodes:
        sends = SENDS.get(node.target, ((), ())) if node.op == "call_function" else ((), ())
        forward.update(sends[0])
        backward.update(sends[1])
    return {kind: (forward[kind], backward[kind]) for kind in forward | backward}


@pytest.mark.parametrize(
    ("spec", "wish"), (("llama3-8b", {"tp": 4}), ("gpt2", {"tp": 2, "dp": 2})), ids=("tp4", "tp2dp2")
)
def test_generated_block(spec: str, wish: dict[str, int]) -> None:
    wanted = Wanted(spec=spec)
    program, plan = planned(wanted, 4, {**wish, "sequence_parallel": False})
    assert in_code(program, plan, regather=True) == WITHOUT
    program, plan = planned(wanted, 4, {**wish, "sequence_parallel": True})
    assert in_code(program, plan, regather=False) == WITH
    assert in_code(program, plan, regather=True) == WITH_REGATHER


@pytest.mark.parametrize(
    "sequence_parallel, per_block", (long(False, {"all-reduce": 4}), (True, {"all-gather": 6, "reduce-scatter": 4}))
)
@pytest.mark.parametrize("spec", ("llama3-8b", long("gpt2")))
def test_profiled_step(spec: str, sequence_parallel: bool, per_block: dict[str, int], two_ranks: Ranks) -> None:
    """The third layer's collectives: those of a step with three layers without those of a step with two."""
    counts = []
    for layers in (2, 3):
        wanted = Wanted(spec=spec, layers=layers)
        _, plan = planned(wanted, 2, {"tp": 2, "sequence_parallel": sequence_parallel})
        found = two_ranks.run("integration_ranks:profiled_step", wanted, plan)
        assert all(one == found[0] for one in found)
        counts.append({kind: calls for kind, (calls, _) in found[0].items()})
    difference = {kind: counts[1][kind] - counts[0].get(kind, 0) for kind in counts[1]}
    assert {kind: calls for kind, calls in difference.items() if calls} == per_block
