"""The factor notation: parsing against shapes, refusals, and what rules say of calls that matter."""

from typing import Any

import pytest
import torch

from autopar.errors import RuleError
from autopar.rules.families._notation import rule_from
from autopar.rules.families.random import draws_numbers
from autopar.rules.families.views import spans
from autopar.rules.registry import Pattern, registered, rule, rule_of
from autopar.rules.rule import Call, MeshDimRef, Rule, Step, TensorInfo, parse
from autopar.testing.rule_proof import sample_of

aten = torch.ops.aten


def call(output: tuple[int, ...], *operands: tuple[int, ...]) -> Call:
    infos = tuple(TensorInfo(shape, torch.float32) for shape in operands)
    return Call("made up", (), {}, infos, TensorInfo(output, torch.float32))


def real(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def rule_for(target: Any, *args: Any, **kwargs: Any) -> Rule:
    return rule_of(sample_of(target, args, kwargs).call)


Local = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], dict[str, tuple[tuple[str, int], ...]]]


def emitted(rule: Rule, target: Any, args: tuple[Any, ...], local: Local) -> tuple[Step, ...]:
    """The steps of a rank with these operand shapes, output shape and splits."""
    assert rule.emit is not None
    return rule.emit(sample_of(target, args, {}).call.on_one_rank(*local))


# parser


def test_ellipsis_is_numbered_from_the_right() -> None:
    parsed = parse("... i, o i[, o] -> ... o", call((2, 3, 5), (2, 3, 4), (5, 4), (5,)), additive=(2,))
    assert parsed.inputs == (((".1",), (".0",), ("i",)), (("o",), ("i",)), (("o",),))
    assert parsed.output == ((".1",), (".0",), ("o",))
    assert parsed.reduced == {"i"} and parsed.additive == {2}
    assert parsed.sizes == {".1": 2, ".0": 3, "i": 4, "o": 5}


def test_optional_operand_may_be_missing() -> None:
    assert len(parse("... i, o i[, o] -> ... o", call((5,), (4,), (5, 4))).inputs) == 2


def test_ellipses_broadcast() -> None:
    parsed = parse("... m k, ... k n -> ... m n", call((6, 2, 3, 5), (6, 1, 3, 4), (2, 4, 5)))
    assert parsed.inputs[0] == ((".1",), (), ("m",), ("k",))
    assert parsed.inputs[1] == ((".0",), ("k",), ("n",))
    assert parsed.output == ((".1",), (".0",), ("m",), ("n",))


def test_packed_dimension_takes_the_size_left_over() -> None:
    parsed = parse("b (c e) -> b e", call((2, 8), (2, 24)), sizes={"e": 8}, whole="c")
    assert parsed.inputs == ((("b",), ("c", "e")),)
    assert parsed.sizes == {"b": 2, "c": 3, "e": 8}
    assert parsed.whole == {"c"}


def test_one_is_the_empty_product() -> None:
    parsed = parse("b n -> b 1", call((2, 1), (2, 7)))
    assert parsed.output == (("b",), ())


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("m k, k n -> m n", call((2, 4), (2, 3), (5, 4))),
        ("m k, k n -> m n", call((2, 4), (2, 3))),
        ("m k -> m k", call((2, 3), (2, 3), (3,))),
        ("m k -> m k", call((2, 3), (2, 3, 4))),
        ("... m k -> m", call((2,), (2,))),
        ("(a b) -> a b", call((2, 3), (6,))),
        ("a, (a b) -> a b", call((4, 2), (4,), (10,))),
    ],
    ids=[
        "sizes differ",
        "operand missing",
        "operand too many",
        "rank too high",
        "rank too low",
        "two unknown sizes",
        "no factor",
    ],
)
def test_pattern_that_does_not_fit_is_refused(text: str, made: Call) -> None:
    with pytest.raises(RuleError):
        parse(text, made)


def test_rule_from_refuses_what_does_not_fit() -> None:
    with pytest.raises(RuleError):
        rule_from(call((2,), (2, 3)), [[("a",)]], [("a",)])
    with pytest.raises(RuleError):
        rule_from(call((2,), (2,), (2,)), [[("a",)]], [("a",)])
    with pytest.raises(RuleError):
        rule_from(call((6,), (5,)), [[("a",)]], [("a",)])


def test_factors_come_in_the_same_order_in_every_process() -> None:
    parsed = parse("... i, o i[, o] -> ... o", call((2, 3, 5), (2, 3, 4), (5, 4)))
    assert list(parsed.sizes) == [".1", ".0", "i", "o"]


# registry


def test_second_rule_for_an_operator_is_refused() -> None:
    registered()
    with pytest.raises(RuleError, match="already has a rule"):
        rule(aten.linear.default)(lambda call: parse("a -> a", call))
    with pytest.raises(RuleError, match="already has a rule"):
        rule(aten.mm.default)(Pattern("m k, k n -> m n"))


def test_operator_without_a_rule_is_whole() -> None:
    found = rule_for(aten.bincount.default, torch.zeros(4, dtype=torch.int64))
    assert not found.known and found.whole == set(found.sizes)


def test_call_that_its_rule_does_not_cover_is_whole() -> None:
    found = rule_for(aten.einsum.default, "ii->i", [real(4, 4)])
    assert not found.known and found.whole == set(found.sizes)


# rules that matter


def test_packed_projection_is_cut_inside() -> None:
    x = real(2, 192)
    found = rule_for(aten.slice.Tensor, x, 1, 64, 128)
    assert found.inputs == ((("d0",), ("c", "e")),) and found.output == (("d0",), ("e",))
    assert found.whole == {"c"}
    local: Local = ((2, 48),), (2, 16), {"e": (("tp", 4),)}
    (step,) = emitted(found, aten.slice.Tensor, (x, 1, 64, 128), local)
    assert step.args[1:] == (1, 16, 32)


def test_unaligned_slice_is_whole_in_its_dimension() -> None:
    found = rule_for(aten.slice.Tensor, real(2, 8), 1, 1, 8)
    assert found.whole == {"x", "y"}


def test_heads_are_factors_of_a_projection() -> None:
    found = rule_for(aten.reshape.default, real(2, 3, 12), [6, 3, 4])
    (batch, sequence, rows), output = found.inputs[0], found.output
    assert output == (batch + sequence, rows[:1], rows[1:]) and not found.whole


def test_crossing_factorisations_are_whole_in_their_span_only() -> None:
    found = rule_for(aten.reshape.default, real(5, 2, 4, 6), [5, 2, 6, 4])
    assert found.whole == {"x2", "x3", "y2", "y3"}
    assert found.inputs[0][:2] == found.output[:2]


def test_spans() -> None:
    assert spans([2, 3, 4], [6, 4]) == [([0, 1], [0]), ([2], [1])]
    assert spans([1, 4], [4, 1, 1]) == [([1], [0])]
    assert spans([], [1]) == []


def test_causal_attention_splits_queries_by_a_rewrite() -> None:
    q, fewer = real(2, 4, 6, 8), real(2, 4, 4, 8)
    causal = rule_for(aten.scaled_dot_product_attention.default, q, q, q, None, 0.0, True)
    free = rule_for(aten.scaled_dot_product_attention.default, q, q, q)
    assert causal.whole == free.whole == {"k", "e"}
    assert causal.even == {"q"} and not free.even
    dropped = rule_for(aten.scaled_dot_product_attention.default, q, q, q, None, 0.1, True)
    unequal = rule_for(aten.scaled_dot_product_attention.default, fewer, q, q, None, 0.0, True)
    assert dropped.whole == unequal.whole == {"q", "k", "e"}


def test_keys_travel_without_a_mask_and_dropout() -> None:
    target, q, mask = aten.scaled_dot_product_attention.default, real(2, 4, 6, 8), real(6, 6)
    own = (("cp", 2),)
    for is_causal in (False, True):
        arguments = (q, q, q, None, 0.0, is_causal)
        found = rule_for(target, *arguments)
        assert found.travels == {"q": "k"}
        half = (2, 4, 3, 8)
        (ring,) = emitted(found, target, arguments, ((half,) * 3, half, {"q:ring": own}))
        assert ring.target == "ring_attention" and ring.args[3:] == (is_causal, None, MeshDimRef("cp"))
        (split,) = emitted(found, target, arguments, ((half, q.shape, q.shape), half, {"q": own}))
        assert (split.target == "causal_attention") == is_causal
    for others in ((mask,), (None, 0.1), (mask, 0.0, False)):
        assert not rule_for(target, q, q, q, *others).travels


def test_grouped_attention_shares_the_key_heads() -> None:
    q, k = real(2, 8, 6, 4), real(2, 2, 6, 4)
    found = rule_for(aten.scaled_dot_product_attention.default, q, k, k, None, 0.0, True, enable_gqa=True)
    assert found.inputs[0][1] == ("g", "r") and found.inputs[1][1] == ("g",)


def test_vocabulary_is_split_by_rewrites() -> None:
    ids = torch.zeros(6, dtype=torch.int64)
    embedding = rule_for(aten.embedding.default, real(10, 4), ids, 3)
    assert embedding.reduced == embedding.outermost == {"v"} and not embedding.invariant
    local: Local = ((5, 4), (6,)), (6, 4), {"v": (("tp", 2),)}
    (step,) = emitted(embedding, aten.embedding.default, (real(10, 4), ids, 3), local)
    assert step.target == "vocab_parallel_embedding" and step.args[2:] == (3, MeshDimRef("tp"))

    arguments = (real(6, 10), ids, None, 2, -1, 0.0)
    loss = rule_for(aten.cross_entropy_loss.default, *arguments)
    assert loss.reduced == {"t0", "v"} and loss.invariant == loss.outermost == {"v"}
    (step,) = emitted(loss, aten.cross_entropy_loss.default, arguments, (((6, 5), (6,)), (), local[2]))
    assert step.target == "vocab_parallel_cross_entropy_sum" and step.args[2:] == (-1, 0.0, 10, MeshDimRef("tp"))
    assert rule_for(aten.cross_entropy_loss.default, real(6, 10), ids, None, 2, -1, 0.1).whole == {"v"}
    assert rule_for(aten.cross_entropy_loss.default, real(6, 10), ids).whole == {"t0", "v"}


def test_linear_sets() -> None:
    x = real(2, 3)
    assert rule_for(aten.linear.default, x, real(4, 3)).linear == (frozenset({0}),)
    assert rule_for(aten.linear.default, x, real(4, 3), real(4)).linear == (frozenset({0, 2}),)
    assert rule_for(aten.add.Tensor, x, x).linear == (frozenset({0, 1}),)
    assert rule_for(aten.add.Tensor, x, 1.0).linear == ()
    assert rule_for(aten.mul.Tensor, x, x).linear == (frozenset({0}), frozenset({1}))
    assert rule_for(aten.div.Tensor, x, x).linear == (frozenset({0}),)
    assert rule_for(aten.div.Tensor_mode, x, x, rounding_mode="floor").linear == ()
    assert rule_for(aten.to.dtype, x, torch.float64).linear == (frozenset({0}),)
    assert rule_for(aten.to.dtype, x, torch.int64).linear == ()
    assert rule_for(aten.reshape.default, x > 0, [6]).linear == ()


def test_random_calls_are_marked() -> None:
    x = real(2, 4)
    assert draws_numbers(sample_of(aten.dropout.default, (x, 0.1, True), {}).call)
    assert not draws_numbers(sample_of(aten.dropout.default, (x, 0.0, True), {}).call)
    assert not draws_numbers(sample_of(aten.dropout.default, (x, 0.1, False), {}).call)
    attention = aten.scaled_dot_product_attention.default
    assert draws_numbers(sample_of(attention, (x, x, x, None, 0.1), {}).call)
    assert not draws_numbers(sample_of(attention, (x, x, x), {}).call)
    assert not draws_numbers(sample_of(aten.add.Tensor, (x, x), {}).call)
