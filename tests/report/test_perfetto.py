"""The predicted time line as a trace."""

from itertools import pairwise

import pytest

from autopar.errors import InputError
from autopar.report.perfetto import perfetto_trace
from autopar.search.result.result import SearchResult


def test_every_pass_is_a_slice(pipeline: SearchResult) -> None:
    assert pipeline.details is not None and pipeline.details.timeline is not None
    timeline, events = pipeline.details.timeline, perfetto_trace(pipeline)["traceEvents"]
    slices = [one for one in events if one["ph"] == "X"]
    assert sum(one["tid"] == 0 for one in slices) == len(timeline.passes)
    assert sum(one["tid"] == 2 for one in slices) == len(timeline.messages) > 0
    names = {one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {f"pipeline rank {rank}" for rank in range(timeline.num_ranks)}


def test_passes_and_waiting_fill_every_rank(pipeline: SearchResult) -> None:
    assert pipeline.details is not None and pipeline.details.timeline is not None
    timeline, events = pipeline.details.timeline, perfetto_trace(pipeline)["traceEvents"]
    for rank in range(timeline.num_ranks):
        own = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] < 2)
        for (start, lasts), (after, _) in pairwise(own):
            assert start + lasts <= after + 20.0  # microseconds; times are kept with six digits
        assert sum(lasts for _, lasts in own) == pytest.approx(timeline.seconds * 1e6, rel=1e-4)


def test_arrows_lead_forward(pipeline: SearchResult) -> None:
    events = perfetto_trace(pipeline)["traceEvents"]
    begins = {one["id"]: one["ts"] for one in events if one["ph"] == "s"}
    ends = {one["id"]: one["ts"] for one in events if one["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert all(begins[number] <= ends[number] + 20.0 for number in begins)


def test_without_a_pipeline_there_is_none(flat: SearchResult, misfit: SearchResult) -> None:
    with pytest.raises(InputError, match="no pipeline"):
        perfetto_trace(flat)
    with pytest.raises(InputError, match="nothing fits"):
        perfetto_trace(misfit)
