"""A trace of one step on real ranks: every rank a process, its passes and blocks, collectives and messages."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_models import Wanted, planned
from test_block_collectives import SENDS

from autopar.capture.analysis import analyse
from autopar.errors import RankError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.schedules.registry import actions
from autopar.ir.stages import stages_of
from autopar.lowering import vocabulary
from autopar.lowering.local_graph import local_graph
from autopar.runtime.distributed.launch import Ranks

# beyond the conversions: two all-reduces inside, a maximum and a sum
INSIDE = {vocabulary.vocab_parallel_cross_entropy_sum: (("all-reduce", "all-reduce"), ())}
WANTED = Wanted(spec="llama3-8b")


def in_generated_code(program: Program, plan: Plan, stage: int) -> Counter[str]:
    """Collectives of one micro-batch of a stage, forward and backward, counted on the code of its blocks."""
    found: Counter[str] = Counter()
    analysis = analyse(program, plan.mesh)
    used = {a for call in program.calls for a in call.arguments} | program.invariant
    for index in stages_of(program, plan.cuts, plan.recomputed)[stage].calls:
        call = program.calls[index]
        block = program.blocks[call.block]
        uses = program.uses_of_block(call.block)
        keep = [o for k, o in enumerate(block.outputs) if any(use.results[k] in used for use in uses)]
        labels = plan.blocks[call.block]
        code = local_graph(analysis, block, call.block, labels, plan.mesh, keep=keep, regather=plan.regather)
        for node in code.graph.nodes:
            if node.op == "call_function":
                forward, backward = (SENDS | INSIDE).get(node.target, ((), ()))
                found.update((*forward, *backward))
    return found


class Trace:
    """A trace as a reader sees it."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text())
        events: list[dict[str, Any]] = document["traceEvents"]
        named = [e for e in events if e["ph"] == "M"]
        self.processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
        self.threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
        self.slices = [e for e in events if e["ph"] == "X"]
        self.arrows = [e for e in events if e["ph"] in "sf"]

    def on(self, pid: int, track: str) -> list[dict[str, Any]]:
        return [e for e in self.slices if e["pid"] == pid and self.threads[pid, e["tid"]] == track]

    def check_nesting(self) -> None:
        """Two slices of a thread are one inside the other or apart, as readers need them."""
        for thread in self.threads:
            open_ends: list[float] = []
            own = [e for e in self.slices if (e["pid"], e["tid"]) == thread]
            for event in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
                assert event["ts"] >= 0 and event["dur"] >= 0
                while open_ends and open_ends[-1] <= event["ts"] + 0.02:
                    open_ends.pop()
                assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1] + 0.02, event
                open_ends.append(event["ts"] + event["dur"])


def test_tensor_and_pipeline_parallel(four_ranks: Ranks, tmp_path: Path) -> None:
    program, plan = planned(WANTED, 4, {"tp": 2, "pp": 2, "micro_batches": 2})
    kept = four_ranks.run("integration_ranks:traced_step", WANTED, plan, str(tmp_path / "trace.json"))
    assert all(kept), "weights, gradients and the losses that follow are as without a trace"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    trace = Trace(tmp_path / "trace.json")
    names = {0: "rank 0: pp 0 dp 0 tp 0", 1: "rank 1: pp 0 dp 0 tp 1"}
    assert trace.processes == names | {2: "rank 2: pp 1 dp 0 tp 0", 3: "rank 3: pp 1 dp 0 tp 1"}
    trace.check_nesting()
    degrees = plan.degrees
    order = actions(degrees.schedule, degrees.pp, degrees.virtual_stages, degrees.micro_batches)
    stages = stages_of(program, plan.cuts, plan.recomputed)
    for rank in range(4):
        stage = rank // 2
        assert {name for (pid, _), name in trace.threads.items() if pid == rank} == {
            "compute",
            "tp",
            "pp",
            "all ranks",
            "point-to-point",
        }
        compute = sorted(trace.on(rank, "compute"), key=lambda e: e["ts"])
        passes = [e["name"] for e in compute if "call" not in e["args"]]
        assert passes == [str(action) for action in order[stage]]
        for kind in "FB":
            blocks = [e for e in compute if "call" in e["args"] and e["args"]["pass"] == kind]
            paths = [program.calls[i].path for i in stages[stage].calls]
            wanted = [(path, m) for m in range(2) for path in (paths if kind == "F" else reversed(paths))]
            assert [(e["name"], e["args"]["micro_batch"]) for e in blocks] == wanted
            inside = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in compute if "call" not in e["args"]}
            for e in blocks:
                start, end = inside[f"{stage}{kind}{e['args']['micro_batch']}"]
                assert start - 0.02 <= e["ts"] and e["ts"] + e["dur"] <= end + 0.02
        collectives = Counter(e["name"] for e in trace.on(rank, "tp"))
        once = in_generated_code(program, plan, stage)
        deferred = Counter({"all-reduce": 1})  # of norm weights under sequence parallelism, once a step
        assert collectives == Counter({kind: 2 * count for kind, count in once.items()}) + deferred
        assert all(e["args"]["ranks"] == 2 and e["args"]["input_bytes"] > 0 for e in trace.on(rank, "tp"))
        assert [(e["name"], e["args"]["input_bytes"]) for e in trace.on(rank, "pp")] == [("all-reduce", 4)]  # the loss
        messages = Counter(
            (e["args"]["from_stage"], e["args"]["to_stage"], e["args"]["micro_batch"], "SEND" in e["name"])
            for e in trace.on(rank, "point-to-point")
        )
        assert messages == Counter({(a, b, m, (a == stage)): 1 for a, b in ((0, 1), (1, 0)) for m in range(2)})
        hidden = 4 // 2 * WANTED.seq_len * WANTED.hidden * torch.float32.itemsize
        expected = hidden // (2 if "reduce-scatter" in collectives else 1)  # sequence parallelism halves it
        assert {e["args"]["bytes"] for e in trace.on(rank, "point-to-point")} == {expected}
    assert len(trace.arrows) == 2 * 8 and {e["ph"] for e in trace.arrows} == {"s", "f"}


def test_data_parallel_with_recomputation(four_ranks: Ranks, tmp_path: Path) -> None:
    wish = {"tp": 2, "dp": 2, "zero": 3, "accumulate": 2, "recompute": "full"}
    program, plan = planned(WANTED, 4, wish)
    four_ranks.run("integration_ranks:traced_step", WANTED, plan, str(tmp_path / "trace.json"))
    trace = Trace(tmp_path / "trace.json")
    trace.check_nesting()
    layers = {call.path for call in program.calls if len(program.uses_of_block(call.block)) > 1}
    for rank in range(4):
        compute = trace.on(rank, "compute")
        passes = Counter(e["name"] for e in compute if "call" not in e["args"])
        assert passes == Counter({"0F0": 1, "0F1": 1, "0B0": 1, "0B1": 1})
        again = Counter(e["name"] for e in compute if e["args"]["pass"] == "recompute")
        assert again == Counter(dict.fromkeys(layers, 2))
        kinds = Counter(e["name"] for e in trace.on(rank, "dp"))
        assert kinds["all-gather"] and kinds["reduce-scatter"], "FSDP2 gathers parameters and sums gradients"
        assert not trace.on(rank, "pp") and not trace.on(rank, "collectives")


def test_a_path_that_cannot_be_written_is_refused_on_all_ranks(two_ranks: Ranks) -> None:
    _, plan = planned(WANTED, 2, {"tp": 2})
    with pytest.raises(RankError, match=r"InputError: /nonexistent/trace.json cannot be written"):
        two_ranks.run("integration_ranks:traced_step", WANTED, plan, "/nonexistent/trace.json")
