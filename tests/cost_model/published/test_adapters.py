"""Published runs that train adapters: parameters and work of a block, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from autopar.cost_model.published.estimate import estimate_rows, prepare
from autopar.cost_model.published.row import Row, RowEstimate, read_row_file
from autopar.cost_model.step.rank_parameters import block_parameters

FULL = Row(
    id="full", layers=32, hidden=4096, ffn_hidden=14336, n_heads=32, n_kv_heads=8, head_dim=128, vocab=32000,
    tied_embeddings=False, gated_mlp=True, seq_len=2048, gpu_type="A100-80", num_gpus=1, tp=1, pp=1, dp=1, zero=0,
    micro_batch=1, global_batch=1, recompute="full", precision="bf16", engine="fsdp", memory_basis="allocated",
)  # fmt: skip


def _layer(row: Row) -> tuple[Any, Any]:
    groups, _ = prepare([row])
    return groups[0].family.block("layer", "tp"), block_parameters(groups[0].family, groups[0].layouts, "layer")


def _estimate(row: Row) -> RowEstimate:
    made = estimate_rows([row])[0]
    assert isinstance(made, RowEstimate)
    return made


def test_only_adapters_are_trained() -> None:
    work, parameters = _layer(replace(FULL, trains="lora:r=16,targets=q_proj+v_proj"))
    whole, every = _layer(FULL)
    added = 16 * (4096 + 4096) + 16 * (4096 + 1024)
    assert float(parameters.trained.dense.max()) == added
    assert float(parameters.dense.max()) == float(every.dense.max()) + added
    frozen = [op for op in work.products if op.kind == "matmul" and op.only == "left"]
    assert len(frozen) == sum(op.kind == "matmul" for op in whole.products)
    assert sum(op.name == "adapter" for op in work.products) == 4


@pytest.mark.parametrize("names", ["up_proj w1 fc1 dense_h_to_4h", "down_proj w2 fc2 dense_4h_to_h"])
def test_a_layer_has_the_same_cost_under_the_name_of_another_model(names: str) -> None:
    works = [_layer(replace(FULL, trains=f"lora:r=16,targets=q_proj+{name}"))[0] for name in names.split()]
    assert len({(float(work.saved_eager_bytes.max()), float(work.parameters_split.max())) for work in works}) == 1


def test_a_quantised_model_holds_a_part_of_the_bytes() -> None:
    lora, four, eight = (_estimate(replace(FULL, trains=t)) for t in ("lora:r=8", "qlora:r=8", "qlora:r=8,bits=8"))
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert (lora.peak_bytes - four.peak_bytes) / linear == pytest.approx(2 - 0.53125, rel=0.03)
    assert (lora.peak_bytes - eight.peak_bytes) / linear == pytest.approx(2 - 1.03125, rel=0.03)
    assert lora.seconds < four.seconds < _estimate(FULL).seconds * 1.2


def test_state_follows_the_stored_dtype_and_the_optimizer() -> None:
    elements = 7.24e9
    wide, narrow, in_8_bits = (
        _estimate(replace(FULL, stored=stored, optimizer_state=kind, gradients="stepped")).peak_bytes
        for stored, kind in ((None, None), ("bf16", None), (None, "adamw8bit"))
    )
    assert (wide - narrow) / elements == pytest.approx(16 - 8, abs=2.5)
    assert (wide - in_8_bits) / elements == pytest.approx(8 - 2, abs=0.5)


@pytest.mark.parametrize(
    ("cell", "words"), [("lora:r=x", "whole number"), ("lora:targets=q", "q_proj"), ("frozen:a", "or")]
)
def test_words_that_a_row_cannot_have(tmp_path: Any, cell: str, words: str) -> None:
    path = tmp_path / "runs.csv"
    names = [name for name in FULL.__slots__ if getattr(FULL, name) is not None]
    values = [str(getattr(FULL, name)) for name in names]
    path.write_text(f'{",".join(names)},trains\n{",".join(values)},"{cell}"\n{",".join(["b", *values[1:]])},\n')
    (left,) = read_row_file(path).left_out
    assert words in left.reason
