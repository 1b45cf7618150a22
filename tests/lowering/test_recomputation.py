"""Selective recomputation: any set of recomputed operators gives the same step, and frees what it should free."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
from equivalence import case_of, check, labelled
from tiny_models import gpt2, llama, megatron

from autopar.ir.plan import BlockLabels
from autopar.ir.sharding import Mesh
from autopar.testing.equivalence import SingleDeviceRun

MESHES = (Mesh.of(), Mesh.of(tp=2), Mesh.of(dp=2, tp=2))
MODELS = {"llama": llama, "gpt2": gpt2, "megatron": partial(megatron, dropout=0.1)}


@cache
def case(name: str) -> SingleDeviceRun:
    return case_of(MODELS[name](2))


def some_recomputed(run: SingleDeviceRun, labels: Sequence[BlockLabels], seed: int) -> tuple[BlockLabels, ...]:
    """Labels that recompute some operators of every block, chosen at random."""
    draw, found = random.Random(seed), []
    for own, block in zip(labels, run.program.blocks, strict=True):
        keys = [node.meta["key"] for node in block.graph.nodes if node.op == "call_function"]
        share = draw.choice((0.2, 0.5, 0.8, 1.0))
        found.append(replace(own, recomputed=tuple(key for key in keys if draw.random() < share)))
    return tuple(found)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_any_set_of_operators_equals_one_device(name: str, mesh: Mesh, seed: int) -> None:
    run = case(name)
    labels = some_recomputed(run, labelled(run, mesh, True), seed)
    check(run, labels, mesh, fuse=True, regather=bool(seed % 2))
