"""Published formulas of a GPT layer, computed from the exported block (Korthikanti et al. 2022, "Reducing activation
recomputation in large transformer models", sections 4-5; Narayanan et al. 2021, appendix)."""

from typing import Any

import pytest
import sympy
from as_sympy import as_sympy

from autopar.cost_model.work.block_work import evaluate, family
from autopar.cost_model.work.polynomials import symbol

s, b, h, a, e, f, t, v, keys = (symbol(name) for name in "sbhaeftvS")
GPT = {e: h / a, f: 4 * h, keys: s, symbol("l"): s}
GIB = 1024**3
# name, micro-batch, layers, hidden, heads, pipeline, chunks, activations in GiB with tp and with tp + sp + selective
MODELS = (
    ("22B", 4, 48, 6144, 64, 1, 1, 59.2500, 9.5625, 22.07, 4, 8),
    ("175B", 1, 96, 12288, 96, 8, 3, 66.8438, 12.3516, 174.62, 64, 64),
    ("530B", 1, 105, 20480, 128, 35, 3, 114.0234, 23.0762, 529.60, 280, 280),
    ("1T", 1, 128, 25600, 160, 64, 1, 131.2500, 26.5625, 1008.04, 512, 512),
)
SEQUENCE, VOCABULARY = 2048, 51200


def attention_scores_saved_bytes(heads: Any = a, sequence: Any = s, batch: Any = b) -> Any:
    """What attention in pieces keeps of its scores in 16 bit: softmax 2, mask of its dropout 1, what that leaves 2."""
    return 5 * heads * sequence**2 * batch


def layer(variant: str) -> Any:
    return family("gpt2").block("layer", variant)


def kept(variant: str, how: str = "saved_fused_bytes") -> Any:
    """Bytes that a layer keeps."""
    return as_sympy(getattr(layer(variant), how))


def statistics() -> Any:
    """What attention in one kernel keeps and attention in pieces does not: a float32 per query and head."""
    return 4 * a * b * s / t


def in_pieces(variant: str) -> Any:
    """Saved bytes of a layer whose attention keeps its scores, at e = h/a and f = 4h."""
    return sympy.expand((kept(variant) - statistics() + attention_scores_saved_bytes() / t).subs(GPT))


def test_tensor_parallel_layer() -> None:
    assert in_pieces("tp") == sympy.expand(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))


def test_one_device_layer() -> None:
    assert in_pieces("tp").subs(t, 1) == sympy.expand(s * b * h * (34 + 5 * a * s / h))


def test_sequence_parallel_layer() -> None:
    assert in_pieces("sp") == sympy.expand(s * b * h * (34 / t + 5 * a * s / (h * t)))


def test_attention_in_one_kernel() -> None:
    saved = kept("sp").subs(GPT)
    assert sympy.expand(saved - statistics()) == sympy.expand(34 * s * b * h / t)


def test_any_width_of_the_feed_forward_layer() -> None:
    saved = kept("sp").subs(e, h / a) - statistics()
    assert sympy.expand(saved) == sympy.expand(s * b * h * (18 + 4 * f / h) / t)


def test_eager_keeps_more_by_the_pieces_of_gelu_and_statistics_of_norms() -> None:
    """gelu's tanh form: four more values as wide as the layer, less its input kept once; norms: mean and deviation."""
    more = kept("tp", "saved_eager_bytes") - kept("tp")
    assert sympy.expand(more) == 3 * 2 * b * s * f / t + 2 * 2 * 4 * b * s


def test_full_recomputation_keeps_the_input() -> None:
    assert kept("tp", "input_bytes") == 2 * s * b * h
    assert kept("sp", "input_bytes") == 2 * s * b * h / t


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
def test_activations_of_the_first_stage(model: Any) -> None:
    _, batch, layers, hidden, heads, stages, chunks, with_tp, with_all = model[:9]
    numbers = {s: SEQUENCE, b: batch, h: hidden, a: heads, t: 8}
    in_flight = layers * (1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1)
    assert float(in_pieces("tp").subs(numbers)) * in_flight / GIB == pytest.approx(with_tp, abs=1e-4)
    flash = (kept("sp") - statistics()).subs(GPT)
    assert float(flash.subs(numbers)) * in_flight / GIB == pytest.approx(with_all, abs=1e-4)


def numbers_of(model: Any) -> dict[str, float]:
    _, batch, _, hidden, heads = model[:5]
    return {"b": batch, "s": SEQUENCE, "S": SEQUENCE, "h": hidden, "a": heads, "e": hidden / heads, "f": 4 * hidden,
            "v": VOCABULARY, "l": SEQUENCE, "t": 1}  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
def test_parameters(model: Any) -> None:
    """12Lh²(1 + 13/(12h) + (V + s)/(12Lh)), which leaves out the last norm: 2h. The head is tied."""
    layers, hidden = model[2:4]
    found = evaluate(family("gpt2"), numbers_of(model))
    first, middle, last = (found.block(role, "tp") for role in ("first", "layer", "last"))
    of_layer = middle.parameters_split + middle.parameters_whole
    total = first.parameters_split + layers * of_layer + last.parameters_whole
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (VOCABULARY + SEQUENCE) / (12 * layers * hidden))
    assert total - 2 * hidden == pytest.approx(formula, rel=1e-12)
    assert total / 1e9 == pytest.approx(model[9], abs=0.006)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
def test_flops_of_a_step(model: Any) -> None:
    _, batch, layers, hidden, *_, sequences, _ = model
    found = evaluate(family("gpt2"), numbers_of(model))
    of_layer, of_head = (sum(o.flops for o in found.block(role, "tp").products) for role in ("layer", "last"))
    part = SEQUENCE / (6 * hidden)
    whole = sequences / batch * 3 * (layers * of_layer + of_head)
    base = sequences * layers * SEQUENCE * hidden**2
    assert whole == pytest.approx(72 * base * (1 + part + VOCABULARY / (12 * hidden * layers)), rel=1e-12)
    again = sequences / batch * (4 * layers * of_layer + 3 * of_head)
    assert again == pytest.approx(96 * base * (1 + part + VOCABULARY / (16 * hidden * layers)), rel=1e-12)


def sent(variant: str, cause: str = "value") -> list[tuple[str, bool, Any]]:
    return [(c.collective, c.is_forward, as_sympy(c.whole_bytes)) for c in layer(variant).sent if c.of == cause]


def test_tensor_parallel_layer_sends_four_all_reduces() -> None:
    both = [("all_reduce", True, 2 * b * s * h), ("all_reduce", False, 2 * b * s * h)]
    assert sorted(sent("tp"), key=str) == sorted(2 * both, key=str)


def test_sequence_parallel_layer_sends_as_many_bytes() -> None:
    size = 2 * b * s * h
    one = [("all_gather", True, size), ("reduce_scatter", True, size)]
    other = [("all_gather", False, size), ("reduce_scatter", False, size)]
    assert sorted(sent("sp"), key=str) == sorted(2 * (one + other), key=str)
    assert sent("sp", "regather") == [("all_gather", False, size)] * 2


def test_gradients_of_norms_are_summed_under_sequence_parallelism() -> None:
    """Weight and bias of two norms; the biases behind the all-gather of a cotangent get theirs whole."""
    assert sum(size for _, _, size in sent("sp", "parameter")) == 2 * 4 * h
    assert as_sympy(layer("sp").parameters_whole) == 6 * h
    assert sent("tp", "parameter") == []
