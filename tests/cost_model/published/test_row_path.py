"""Rows of published runs and captured models are priced the same: FLOP, bytes and seconds of one layout, both ways.

Presets are captured with two layers; the counts of their layers are put back before both are priced, which is exact:
an estimate knows layers by their counts alone (`test_layers_are_counts`).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_rows import decoders, row_of_config
from suites import thinned

from autopar.capture.request import Request
from autopar.cost_model.estimate import estimate_works
from autopar.cost_model.machine.engine import Engine, engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.pricing import Question, family_at, layout_of
from autopar.cost_model.published.estimate import estimate_rows, prepare
from autopar.cost_model.published.row import NoEstimate, Row, RowEstimate
from autopar.cost_model.work.block_work import Family
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.cluster import ClusterSpec
from autopar.ir.program import Program
from autopar.models.load import resolve_model
from autopar.planning.degrees import resolve_degrees
from autopar.planning.estimate import priceable_of
from autopar.planning.fixed import capture_for
from autopar.presets.models import model_preset, model_presets

CLOSE = 1e-3
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
POSITIONS = ("n_positions",)  # of a learned table: rows take the sequence for its length
SEQUENCE = 2048
# a table as long as the sequence: MPT's biases of positions hide the sequence of inputs that are as long as they
SHORTER = {"mpt-7b": 1024}
LAYOUTS = (("autopar", 1), ("autopar", 2), ("megatron", 1), ("megatron", 2))  # engines and tensor degrees
# A row has the labels of its family's shipped blocks. Over data-parallel ranks the labeller decides otherwise for this
# mixture's sizes: every rank runs the operators of experts whole, and not on partial values.
OTHER_LABELS = {"mixtral-8x22b": tuple(layout for layout in LAYOUTS if layout[0] != "autopar")}
# one of each mechanism runs by default: one tensor rank, labels over data-parallel ranks, equal key heads, windows
QUICK = {"gpt2": LAYOUTS, "llama2-7b": LAYOUTS[:2], "llama3-8b": LAYOUTS, "phi3-mini": LAYOUTS[:1]}


def config_of(name: str, layers: int | None = None) -> dict[str, Any]:
    config = dict(model_preset(name).config)
    return config if layers is None else {**config, **{key: layers for key in LAYERS if key in config}}


def captured(name: str, folder: Path, layers: int) -> tuple[Program, dict[str, Any]]:
    """A preset with other layers, and its config with its own layers and what transformers fills in."""
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(config_of(name, layers)))
    positions = (value for key, value in config_of(name).items() if key in POSITIONS)
    length = min([SHORTER.get(name, SEQUENCE), *positions])
    found = resolve_model(str(folder), seq_len=length, batch=2, dtype="bfloat16")
    program = capture_for(
        Request.of(found.model, found.example_inputs), resolve_degrees({"dp": 2, "micro_batch": 2}, 2)
    )
    return program, {**(found.config or {}), **config_of(name)}


def works_and_question(program: Program, engine: Engine, tp: int) -> tuple[ProgramWorks, Question]:
    spec = ClusterSpec.preset(f"{2 * tp}xh100-sxm")
    wish = {"tp": tp, "dp": 2, "zero": 1, "micro_batch": 2, "sequence_parallel": tp > 1}
    found = priceable_of(program, spec, resolve_degrees(wish, 2 * tp), engine)
    works = replace(found.works, has_master_weights=True)  # as every published run
    return works, Question(cluster=spec, degrees=found.degrees, engine=engine, precision="bf16")


def row_like(config: Mapping[str, Any], works: ProgramWorks, engine: Engine, tp: int) -> Row:
    found = row_of_config(
        config, "row", seq_len=works.sequence, gpu_type="h100-sxm", num_gpus=2 * tp, tp=tp, etp=tp, sp=tp > 1, pp=1,
        dp=2, zero=1, micro_batch=2, global_batch=4, recompute="none", precision="bf16",
        engine=engine.name,
    )  # fmt: skip
    assert isinstance(found, Row)
    return found


def with_layers(works: ProgramWorks, layers: int) -> ProgramWorks:
    had = sum(count for _, count in works.counts)
    return replace(works, counts=tuple((role, count * layers // had) for role, count in works.counts))


def sums(family: Family[Any], counts: list[tuple[str, float]], engine: Engine) -> dict[str, float]:
    """FLOP, bytes moved by operators between products, and bytes kept, of one rank and micro-batch."""
    found = dict.fromkeys(("flops", "moved", "saved", "parameters"), 0.0)
    for role, count in [*counts, ("first", 1.0), ("last", 1.0)]:
        if not count:
            continue
        work = family.block(role, "sp")
        memory = work.fused if engine.pointwise == "fused" else work.eager
        found["flops"] += count * float(sum(np.max(one.flops) for one in work.products))
        found["moved"] += count * float(sum(np.max(one.forward_bytes + one.backward_bytes) for one in memory))
        if role not in ("first", "last"):
            saved = work.saved_fused_bytes if engine.pointwise == "fused" else work.saved_eager_bytes
            found["saved"] += count * float(np.max(saved))
        found["parameters"] += count * float(
            np.max(work.parameters_split + work.parameters_whole + work.parameters_expert)
        )
    return found


def compared(program: Program, config: Mapping[str, Any], engine: Engine, tp: int) -> dict[str, tuple[float, float]]:
    """Of both ways: sums over blocks, seconds of a step, peak bytes."""
    works, question = works_and_question(program, engine, tp)
    row = row_like(config, works, engine, tp)
    works = with_layers(works, row.layers or 0)
    made = estimate_works(works, question)
    (priced,), (group,) = estimate_rows([row]), prepare([row])[0]
    assert isinstance(priced, RowEstimate)
    mine = sums(
        family_at(works, layout_of(works, question.degrees), mechanisms()),
        [(role, float(n)) for role, n in works.counts],
        engine,
    )
    theirs = sums(group.family, [(role, float(np.max(n))) for role, n in group.shape.counts], engine)
    both = {key: (mine[key], theirs[key]) for key in mine}
    return {
        **both,
        "seconds": (made.step_s, priced.seconds),
        "peak": (made.peak_bytes, float(np.max(group.memory.peak_bytes))),
    }


def assert_agree(name: str, folder: Path, layouts: tuple[tuple[str, int], ...]) -> None:
    program, config = captured(name, folder, 2)
    for engine, tp in layouts:
        for what, (mine, theirs) in compared(program, config, engine_named(engine), tp).items():
            assert mine == pytest.approx(theirs, rel=CLOSE), (engine, tp, what)


@pytest.mark.parametrize("name", thinned(QUICK, keep=("gpt2", "phi3-mini")))
def test_rows_and_captures_agree(name: str, tmp_path: Path) -> None:
    assert_agree(name, tmp_path, QUICK[name])


@pytest.mark.long
@pytest.mark.parametrize("name", decoders())
def test_rows_and_captures_of_every_decoder_agree(name: str, tmp_path: Path) -> None:
    assert_agree(name, tmp_path, OTHER_LABELS.get(name, LAYOUTS))


def test_layers_are_counts(tmp_path: Path) -> None:
    engine = engine_named("autopar")
    two, four = (works_and_question(captured("gpt2", tmp_path, layers)[0], engine, 2) for layers in (2, 4))
    scaled = estimate_works(with_layers(two[0], 4), two[1])
    whole = estimate_works(four[0], four[1])
    assert (scaled.step_s, scaled.peak_bytes) == pytest.approx((whole.step_s, whole.peak_bytes))


def test_every_decoder_is_a_row() -> None:
    for name in model_presets():
        found = row_of_config(config_of(name), name, seq_len=SEQUENCE)
        assert isinstance(found, Row) == (name in decoders()), name
        assert isinstance(found, Row) or found.reason


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma2-9b", {"sliding_window": 1024}, "some layers only"),
        ("gpt-neox-20b", {"hidden_act": "relu"}, "relu"),
        ("falcon-7b", {"multi_query": False}, "key head for every head"),
        ("falcon-40b", {"alibi": True}, "bias of the scores"),
        ("bert-large", {}, "no family"),
    ],
)
def test_what_columns_do_not_say_has_a_reason(name: str, changes: dict[str, Any], reason: str) -> None:
    found = row_of_config({**config_of(name), **changes}, name, seq_len=SEQUENCE)
    assert isinstance(found, NoEstimate)
    assert reason in found.reason


def test_every_compared_column_is_stated() -> None:
    found = row_of_config(config_of("llama3-8b"), "llama3-8b")
    assert isinstance(found, Row)
    assert (found.layers, found.hidden, found.ffn_hidden, found.n_heads, found.n_kv_heads) == (32, 4096, 14336, 32, 8)
    assert (found.vocab, found.tied_embeddings, found.gated_mlp) == (128256, False, True)
