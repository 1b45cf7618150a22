"""Writes the search results that the tests of reports read: `python tests/report/make_examples.py` (a minute).

`pipeline` is Llama 3 8B over four stages with slow links between hosts, `flat` the same model without a pipeline,
`misfit` one that fits nowhere. The files keep every tenth candidate to stay small.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.cache.captures import captured_model
from autopar.cache.store import cache_folder
from autopar.ir.cluster import ClusterSpec
from autopar.planning.captured_search import search_captured
from autopar.planning.options import PlanOptions
from autopar.search.result.result import SearchResult

EVERY = 10
FOLDER = Path(__file__).parent / "examples"


def main() -> None:
    fast = ClusterSpec.preset("32xa100-80gb")
    assert fast.inter_host is not None
    link = replace(fast.inter_host, bytes_per_s=fast.inter_host.bytes_per_s / 16)
    slow = replace(fast, name="32xa100-80gb, slow links", inter_host=link)
    write("pipeline", "llama3-8b", slow, 64, fix={"pp": 4}, forbid={"schedule": "interleaved-zero-bubble"})
    write("flat", "llama3-8b", ClusterSpec.preset("64xh100"), 256)
    write("misfit", "llama3-70b", ClusterSpec.preset("8xa100-40gb"), 64)


def write(name: str, model: str, cluster: ClusterSpec, global_batch: int, **narrowing: Any) -> None:
    captured = captured_model(model, folder=cache_folder(), seq_len=4096, dtype="bfloat16")
    asked = PlanOptions(global_batch=global_batch, report=True, **narrowing)
    found = search_captured(captured.capture, cluster, asked, name=captured.name, say=lambda _: None)
    data = json.dumps(thinned(found).to_dict(), separators=(",", ":"))
    (FOLDER / f"{name}.json").write_text(data + "\n", encoding="utf-8")


def thinned(found: SearchResult) -> SearchResult:
    if found.points is None:
        return found
    columns = found.points.columns
    count = len(next(iter(columns.values()), ()))
    kept = [i for i in range(count) if i % EVERY == 0 or columns["exact"][i]]
    points = replace(found.points, columns={name: tuple(column[i] for i in kept) for name, column in columns.items()})
    return replace(found, points=points)


if __name__ == "__main__":
    main()
