"""The cases whose results may not change, and what a rank does for one of them. `#` starts a comment in a list."""

import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parent
HELPERS = ("cli", "tiny", "families", "integration/ranks", "unchanged", "../tools")
sys.path[:0] = [str(TESTS / folder) for folder in HELPERS if str(TESTS / folder) not in sys.path]  # ranks too

SEVERAL = {"tp_dims", "cp_dims"}  # degrees of several numbers
FLOAT32 = ("mixtral", "deepseek_v3", "gpt_oss")  # experts that ranks hold parts of have no float64; the others have
BATCH, STEPS, RATE, CLIP = 4, 3, 0.1, 1.0


def cases(kind: str) -> list[str]:
    """The cases of a file such as `plan.txt`."""
    lines = (line.partition("#")[0].strip() for line in (HERE / f"{kind}.txt").read_text().splitlines())
    return [line for line in lines if line]


def wish_of(case: str) -> tuple[str, dict[str, Any]]:
    """The family of a run, and its degrees: ``llama tp=2 zero=3``."""
    family, *words = case.split()
    return family, {name: _value(name, text) for name, _, text in (word.partition("=") for word in words)}


def _value(name: str, text: str) -> Any:
    if name in SEVERAL:
        return tuple(map(int, text.split(",")))
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


def num_ranks(wish: Mapping[str, Any]) -> int:
    """The ranks of a run."""
    names = ("pp", "tp", "cp", "dp", "dp_shard", "dp_replicate")
    return prod(wish.get(name, 1) for name in names) * prod(prod(wish.get(name, ())) for name in SEVERAL)


@lru_cache(maxsize=3)
def built(family: str, precision: str | None) -> tuple[Any, Any]:
    """The program of a family's tiny model at `BATCH` sequences, and its seeded weights."""
    from mixtures import example
    from torch.utils import _pytree as pytree
    from zoo import FAMILIES

    from autopar.capture.request import Request
    from autopar.ir.degrees import Degrees
    from autopar.planning.fixed import capture_for
    from autopar.runtime.parameters.materialise import parameter_source

    model, inputs = example(family, BATCH) if family in FLOAT32 else FAMILIES[family](BATCH)
    if precision is not None:
        model = model.float()
        inputs = pytree.tree_map(lambda x: x.float() if x.is_floating_point() else x, inputs)
    degrees = Degrees(micro_batch=BATCH, precision=precision)
    return capture_for(Request.of(model, inputs), degrees), parameter_source(model)


def planned(case: str) -> Any:
    """The plan of a run."""
    from dataclasses import replace

    from autopar.ir.cluster import ClusterSpec
    from autopar.planning.degrees import resolve_degrees
    from autopar.planning.fixed import label_plan

    family, wish = wish_of(case)
    regather = wish.pop("regather", True)
    split = prod(wish.get(name, 1) for name in ("dp", "dp_shard", "dp_replicate"))
    rows = BATCH // split * wish.get("micro_batches", 1) * wish.get("accumulate", 1)
    degrees = resolve_degrees(wish, num_ranks(wish), rows)
    program, _ = built(family, degrees.precision)
    cluster = ClusterSpec.preset(f"{degrees.world_size}xcpu")
    return replace(label_plan(program, cluster, degrees, family), regather=regather)


def trained(rank: int, case: str, plan: Any) -> dict[str, Any]:
    """Losses and norms of gradients of some steps, and calls and bytes that this rank sends in the last step."""
    import torch
    from priced_ranks import kind

    from autopar.runtime.distributed.collective_log import log_collectives
    from autopar.runtime.model.module import ParallelModel
    from autopar.runtime.profile.trace_step import tracks_of
    from autopar.runtime.verify.random_batches import random_batches
    from autopar.runtime.verify.verify import this_ranks_part

    program, source = built(wish_of(case)[0], plan.degrees.precision)
    model = ParallelModel(program, plan, source, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, norms = [], []
    for batch in random_batches(program, plan.degrees, STEPS, 0):
        part = this_ranks_part(program, batch, plan.degrees, model.rank_mesh.sample_ranks.coordinate)
        with log_collectives() as sent:
            losses.append(float(model.forward_backward(part)))
        norms.append(float(model.clip_grad_norm_(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    tracks = tracks_of(model.rank_mesh, {s.group for s in sent if s.group is not None})
    counts: dict[str, list[int]] = {}
    for s in sent:
        if s.num_ranks > 1:
            total = counts.setdefault(f"{tracks[str(s.group)]} {kind(s)}", [0, 0])
            total[:] = total[0] + 1, total[1] + s.input_bytes
    return {"loss": losses, "norm": norms, "sent": dict(sorted(counts.items()))}


def entries() -> Iterator[Any]:
    """The models of the census, each name once."""
    from census_models import entries as all_entries

    seen = set()
    for entry in all_entries():
        if entry.name not in seen:
            seen.add(entry.name)
            yield entry
