"""The gap of plans to the lower bound, on models of full size: `python benchmarks/search_gap.py [WORD ...]`.

Every case, or every case whose line holds all words, is a line of a Markdown table. It has the best plan, its step, its
gap to the lower bound of all plans, and whether it is proven. Then come candidates, exact prices, trials, and seconds
of the search without the capture (kept in ``AUTOPAR_CACHE_DIR``). The last line has medians. Models whose loss mixes
the sequences of a batch (the balance of experts) are searched with `per_micro_batch`.
"""

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from autopar.cache.captures import captured_model
from autopar.cache.store import cache_folder
from autopar.cost_model.machine.cluster import default_precision
from autopar.ir.cluster import ClusterSpec
from autopar.ir.rank_order import ORDERS
from autopar.planning.captured_search import search_captured
from autopar.planning.fixed import program_for
from autopar.planning.labels import LABELLED
from autopar.planning.options import PlanOptions
from autopar.search.result.result import SearchResult

MODEL_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # by precision
HEADER = "| model | cluster | batch | plan | step, s | gap | proven | candidates | prices | trials | search, s |"
# from a preset and a sequence length to clusters and batches
CASES: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {
    ("llama3-8b", 8192): (
        ("8xh100", 64), ("64xh100", 128), ("64xv100-32gb", 128), ("48xa100-40gb", 96), ("16xrtx4090", 32),
    ),
    ("llama2-13b", 4096): (("16xa100-40gb", 64), ("24xa100-80gb", 96), ("128xh100", 512)),
    ("mixtral-8x7b", 4096): (("64xh100", 256), ("64xmi300x", 256), ("128xa100-80gb", 512)),
    ("llama3-70b", 8192): (("64xh100", 64), ("128xa100-80gb", 256), ("1024xh100", 1024), ("128xb200", 512)),
    ("gpt3-175b", 2048): (("256xa100-80gb", 512), ("1024xa100-80gb", 1536), ("512xh100", 1024)),
    ("llama3-405b", 8192): (("1024xh100", 512), ("16384xh100", 2048)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Found:
    """A case and the result of its search."""

    model: str
    cluster: str
    batch: int
    result: SearchResult

    def __str__(self) -> str:
        one = self.result
        assert one.best is not None
        assert one.gap is not None
        counted = one.counted
        return (
            f"| {self.model} | {self.cluster} | {self.batch} | {in_short(one)} | {one.best.step_s:.3f} | "
            f"{100 * one.gap:.2f} % | {'yes' if one.is_proven else 'no'} | {counted.candidates:,} | {counted.priced} | "
            f"{one.refined} | {one.seconds:.1f} |"
        )


def in_short(found: SearchResult) -> str:
    assert found.best is not None
    degrees = found.best.degrees
    words = [f"{word}{degrees[name]}" for word, name in (("tp", "tp"), ("pp", "pp")) if degrees[name] > 1]
    words += [f"dp{degrees['dp_shard'] * degrees['dp_replicate']} zero{degrees['zero']}"]
    if degrees["pp"] > 1:
        words += [f"{degrees['schedule']} ×{degrees['virtual_stages']}"]
    words += [degrees["order"]] if degrees["order"] != ORDERS[0] else []
    words += ["recompute"] if degrees["recompute"] != "none" else []
    return " ".join(words)


def cases(words: list[str]) -> Iterator[Found]:
    """Search every case whose line holds all words."""
    for (model, sequence), asked in CASES.items():
        wanted = [one for one in asked if all(word in f"{model} {one[0]} {one[1]}" for word in words)]
        if not wanted:
            continue
        for cluster, batch in wanted:
            spec = ClusterSpec.preset(cluster)
            precision = default_precision(spec)
            captured = captured_model(model, folder=cache_folder(), seq_len=sequence, dtype=MODEL_DTYPES[precision])
            mixes = program_for(captured.capture, LABELLED).mixes_batch is not None
            fix = {"per_micro_batch": True} if mixes else {}
            request = PlanOptions(global_batch=batch, precision=precision, fix=fix)
            result = search_captured(captured.capture, spec, request, name=model, on_progress=lambda _: None)
            yield Found(model=model, cluster=cluster, batch=batch, result=result)


def main(*words: str) -> None:
    logging.disable(logging.WARNING)
    print(HEADER)
    print("|" + " --- |" * (HEADER.count("|") - 1))
    found = []
    for one in cases(list(words)):
        if one.result.best is None:
            print(f"| {one.model} | {one.cluster} | {one.batch} | nothing fits | | | | | | | |", flush=True)
            continue
        print(one, flush=True)
        found.append(one.result)
    gaps = [one.gap for one in found if one.gap is not None]
    proven = sum(one.is_proven for one in found)
    print(f"\n{len(found)} cases, {proven} proven; gap: median {100 * median(gaps):.2f} %, "
          f"largest {100 * max(gaps):.2f} %; search: median {median(one.seconds for one in found):.1f} s")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
