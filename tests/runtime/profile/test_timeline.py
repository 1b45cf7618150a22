"""Slices from profiles: kernels of a GPU, groups that NCCL names, backward passes by autograd's numbers, lanes."""

from typing import Any

import pytest

from autopar.errors import InputError
from autopar.runtime.distributed.collective_log import LoggedCollective, kind_of
from autopar.runtime.profile.chrome_trace import chrome_trace, nested_tracks, track_times, write_whole
from autopar.runtime.profile.timeline import Slice, range_name, slices_of


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 9, "tid": tid, "args": args}


def numbered(name: str, ts: float, number: int, *, backward: bool = False) -> dict[str, Any]:
    name = f"autograd::engine::evaluate_function: {name}" if backward else name
    tid = 2 if backward else 1  # on GPUs backward runs in a thread of its own
    return event(name, ts, 4, tid=tid, **{"Sequence number": number, "Fwd thread id": int(backward)})


def launched(name: str, at: float, runs: float, correlation: int, tid: int = 1, **args: Any) -> list[dict[str, Any]]:
    return [
        event("cudaLaunchKernel", at, 1, "cuda_runtime", tid, correlation=correlation),
        event(name, runs, 10, "kernel", 7, correlation=correlation, **args),
    ]


HOST = [
    event(range_name("a", 0, 0, 0), 10, 20, "user_annotation"),
    numbered("aten::linear", 12, 100),
    numbered("aten::relu", 18, 101),
    event(range_name("b", 1, 0, 0), 40, 20, "user_annotation"),
    numbered("aten::linear", 42, 102),
    numbered("aten::view", 50, 103),  # makes no node: it shows what the next will get
    numbered("aten::div", 62, 103),
    numbered("DivBackward0", 70, 103, backward=True),
    numbered("AddmmBackward0", 80, 102, backward=True),
    numbered("ReluBackward0", 90, 101, backward=True),
    numbered("AddmmBackward0", 96, 100, backward=True),
]


def found(
    events: list[dict[str, Any]], sent: list[LoggedCollective] | None = None
) -> set[tuple[str, str, Any, float, float]]:
    slices = slices_of({"traceEvents": events}, sent or [], tracks={"5": "tp"}, micro_batches=1)
    return {(s.track, s.name, s.details.get("pass"), s.start_us, s.end_us) for s in slices}


def test_backward_passes_of_blocks_by_the_numbers_of_autograd() -> None:
    assert found(HOST) == {
        ("compute", "a", "F", 10, 30),
        ("compute", "b", "F", 40, 60),
        ("compute", "b", "B", 80, 84),
        ("compute", "a", "B", 90, 100),
        ("compute", "0F0", "F", 10, 60),
        ("compute", "0B0", "B", 80, 100),
    }


def test_a_range_that_runs_again_is_recomputation() -> None:
    again = event(range_name("a", 0, 0, 0), 91, 3, "user_annotation")
    assert ("compute", "a", "recompute", 91, 94) in found([*HOST, again])


def test_kernels_of_a_gpu() -> None:
    kernels = [
        *launched("gemm", 14, 1010, 1),
        *launched("relu", 19, 1030, 2),
        *launched(
            "ncclDevKernel_AllReduce", 20, 1100, 3, **{"Collective name": "allreduce", "Process Group Name": "5"}
        ),
        *launched("backward", 92, 2000, 4, tid=2),
    ]
    every = found([*HOST, *kernels])
    assert {one for one in every if one[0] == "compute" and one[1] == "a"} == {
        ("compute", "a", "F", 1010, 1040),
        ("compute", "a", "B", 2000, 2010),
    }
    assert ("host", "a", "F", 10, 30) in every
    assert {one for one in every if one[0] == "tp"} == {("tp", "all-reduce", None, 1100, 1110)}


def test_messages_and_collectives_of_a_pipeline_on_the_host() -> None:
    events = [
        event("PP:0F0", 0, 10, "user_annotation"),
        event("_c10d_functional::all_reduce", 2, 3),
        event("c10d::allreduce_", 3, 1),  # inside the other: one call
        event("gloo:all_reduce", 4, 3, "user_annotation"),
        event("PP:0SEND_F0", 10, 5, "user_annotation"),
        event("c10d::send", 11, 2),
        event("PP:0RECV_B0", 15, 2, "user_annotation"),
        event("c10d::recv_", 16, 0.5),
        event("gloo:recv", 16.2, 20, "user_annotation"),
        event("PP:0F0", 50, 10, "user_annotation"),  # the schedule runs again
    ]
    sent = [
        LoggedCollective(operator=name, group=group, num_ranks=2, input_bytes=size, output_bytes=size)
        for name, group, size in (
            ("_c10d_functional::all_reduce", "5", 8),
            ("c10d::send", "1", 64),
            ("c10d::recv_", "1", 32),
        )
    ]
    setting: dict[str, Any] = {"tracks": {"5": "tp", "1": "pp"}, "micro_batches": 4, "origin_ns": 1_000_000}
    slices = {s.name: s for s in slices_of({"traceEvents": events, "baseTimeNanoseconds": 2_000_000}, sent, **setting)}
    assert slices.keys() == {"0F0", "0F4", "all-reduce", "0SEND_F0", "0RECV_B0"}
    reduce = slices["all-reduce"]
    assert (reduce.track, reduce.start_us, reduce.duration_us) == ("tp", 1004, 3)
    assert (reduce.details["input_bytes"], reduce.details["ranks"]) == (8, 2)
    send, receive = slices["0SEND_F0"], slices["0RECV_B0"]
    assert [send.details[k] for k in ("from_stage", "to_stage", "bytes")] == [0, 1, 64]
    assert [receive.details[k] for k in ("from_stage", "to_stage", "bytes")] == [1, 0, 32]
    assert receive.end_us == pytest.approx(1036.2)  # when the data is there
    unlike = {s.name: s for s in slices_of({"traceEvents": events}, sent[:1], **setting)}
    assert unlike["all-reduce"].track == "collectives" and not unlike["all-reduce"].details


@pytest.mark.parametrize(
    "operator, kind",
    [
        ("c10d::_allgather_base_", "all-gather"),
        ("c10d::_reduce_scatter_base_", "reduce-scatter"),
        ("c10d::reduce_scatter_tensor_coalesced_", "reduce-scatter"),
        ("c10d::alltoall_base_", "all-to-all"),
        ("_c10d_functional::all_to_all_single", "all-to-all"),
        ("c10d::broadcast_", "broadcast"),
        ("c10d::recv_", None),
    ],
)
def test_kinds(operator: str, kind: str | None) -> None:
    assert kind_of(operator) == kind


def at(start: float, end: float, track: str = "tp") -> Slice:
    return Slice(track=track, name="x", start_us=start, duration_us=end - start)


def test_slices_that_overlap_get_lanes() -> None:
    made = nested_tracks([at(0, 10), at(2, 4), at(5, 12), at(10, 11), at(0, 1, "compute")])
    assert [(track, [(s.start_us, s.end_us) for s in own]) for track, own in made] == [
        ("compute", [(0, 1)]),
        ("tp", [(0, 10), (2, 4), (10, 11)]),
        ("tp", [(5, 12)]),
    ]
    times = track_times(
        chrome_trace([("rank 0: pp 0 dp 0 tp 0", [at(1000, 1010), at(1005, 1020), at(1030, 1040)])], {})
    )
    assert [(t.rank, t.track, t.num_slices, t.busy_us, t.end_us) for t in times] == [
        ("rank 0: pp 0 dp 0 tp 0", "tp", 3, 30, 40)
    ]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Any) -> None:
    target = tmp_path / "trace.json"
    target.write_text("before")
    with pytest.raises(TypeError):
        write_whole(target, {"traceEvents": [object()]})
    assert target.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "nowhere" / "trace.json", {})
