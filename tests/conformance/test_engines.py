"""Every engine file: it loads, its numbers have sources, `estimate` runs with it. Every mechanism word is priced."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.request import Request
from autopar.cost_model.machine.engine import Engine, Module, engine_named, engines
from autopar.cost_model.published import estimate as published
from autopar.cost_model.published.row import NoEstimate, Row, RowEstimate, read_rows
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import capture_for

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "cost_model" / "machine" / "engines"
RUNS = ROOT / "benchmarks" / "data" / "published_runs.csv"
NUMBERS = [name for name in Engine.model_fields if name.endswith(("_bytes", "_elements"))]
MODULES = [one for one in get_args(Module) if one != "core_attn"]
PLANS: tuple[dict[str, Any], ...] = (
    {"zero": 3},
    {"zero": 0, "accumulate": 2},
    {"tp": 2, "zero": 1},
    {"pp": 2, "zero": 1, "micro_batches": 4},
)

every_engine = pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))


@every_engine
def test_it_loads(name: str) -> None:
    engine = engine_named(name)
    assert (engine.name, engines()[name]) == (name, engine)
    assert len(engines()) == len(list(FOLDER.glob("*.yaml")))
    assert engine.until or all(engine_named(framework) == engine for framework in engine.frameworks)
    assert engine.sharded_state_bytes <= engine.state_bytes


@every_engine
def test_every_stated_number_has_a_source(name: str) -> None:
    engine = engine_named(name)
    assert not set(engine.sources) - set(Engine.model_fields)
    assert not set(NUMBERS) & engine.model_fields_set - set(engine.sources)


# ---- estimate ----


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.pow(2).mean()}


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model, batch = Stack().to(torch.bfloat16), {"x": torch.empty(2, 16, 64, dtype=torch.bfloat16)}
    degrees: Degrees = resolve_degrees({"micro_batch": 2}, 8)
    return capture_for(Request.of(model, batch), degrees)


@every_engine
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_estimate_runs_with_it(name: str, plan: dict[str, Any], program: Program) -> None:
    made = autopar.estimate(program, "8xh100", {"micro_batch": 2, **plan}, engine=name)
    assert made.engine == name and 0 < made.step_s < 1 and 0 < made.peak_bytes < 80e9
    exposed = sum(one.exposed_s for one in made.collectives)
    assert sum(made.compute_s.values()) + exposed + sum(made.other_s.values()) == pytest.approx(made.step_s)
    assert sum(made.memory_bytes.values()) == pytest.approx(made.peak_bytes)


# ---- mechanisms ----


def words() -> Iterator[tuple[str, Any, Any]]:
    """Every field with a choice of words, and each word beside the first."""
    for name, field in Engine.model_fields.items():
        if name in ("name", "description", "like", "frameworks", "until", "sources"):
            continue
        if field.annotation is bool:
            yield name, False, True
        elif name == "selective":
            yield from ((name, ["core_attn"], other) for other in ("half", "products", *([one] for one in MODULES)))
        elif choices := get_args(field.annotation):
            yield from ((name, choices[0], other) for other in choices[1:])
        else:
            yield name, 30, 31


@cache
def runs_of_every_kind() -> list[Row]:
    """Of published runs, the first of every kind of layout, and some that do not state sequence parallelism."""
    kinds: dict[Any, Row] = {}
    for row in read_rows(RUNS):
        degrees = [(degree or 1) > 1 for degree in (row.tp, row.pp, row.ep, row.dp)]
        kinds.setdefault((*degrees, row.zero, row.vpp is None, row.recompute, row.sp), row.without_result())
    assert len(kinds) > 40
    experts = [replace(row, recompute="selective") for row in kinds.values() if row.moe_experts]
    return [*kinds.values(), *(replace(row, sp=None) for row in kinds.values() if row.sp), *experts]


@pytest.mark.parametrize("field, first, other", list(words()), ids=str)
def test_every_word_is_priced(field: str, first: Any, other: Any) -> None:
    """Some run, priced with some engine, is predicted otherwise with another word."""
    bases = ("megatron", "deepspeed-zero3", "internevo", "autopar")
    tried = ((base, stride) for stride in (6, 1) for base in bases)  # few of the runs show most words
    assert any(
        len({predicted(base, field, json.dumps(word), stride) for word in (first, other)}) == 2
        for base, stride in tried
    )


@cache
def predicted(base: str, field: str, word: str, stride: int) -> str:
    """Figures of each so many runs with an engine whose field has another word, in JSON."""
    rows = runs_of_every_kind()[::stride]
    engine = engine_named(base).model_copy(update={field: json.loads(word)})
    with mock.patch.object(published, "engine_of", lambda row: engine):
        if field == "offload":  # published runs do not state the figures of their hosts
            groups, _ = published.prepare(rows)
            return str([group.memory.peak_bytes.tolist() for group in groups])
        made = published.estimate_rows(rows)
    return str([one.reason if isinstance(one, NoEstimate) else (one.seconds, one.peak_bytes) for one in made])


def test_most_of_these_runs_are_predicted() -> None:
    made = published.estimate_rows(runs_of_every_kind())
    assert sum(isinstance(one, RowEstimate) for one in made) > len(made) / 2
