"""Rules that users register for operators of their own: refusals, and the proof of right and of wrong rules."""

from typing import Any

import pytest
import torch

import autopar
from autopar.errors import RuleError, VerificationError
from autopar.rules.registry import register_rule, rule_of
from autopar.rules.rule import Call, Rule, parse
from autopar.testing.rule_proof import prove_rule, sample_of

aten = torch.ops.aten


@torch.library.custom_op("test_own_rules::mix", mutates_args=())
def mix(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product per head, ``b h e, h e f, f -> b h f``."""
    out = torch.einsum("bhe,hef->bhf", x, weight)
    return out.clone() if bias is None else out + bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.has_bias = inputs[2] is not None


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    x, weight = ctx.saved_tensors
    grads = torch.einsum("bhf,hef->bhe", grad, weight), torch.einsum("bhf,bhe->hef", grad, x)
    return (*grads, grad.sum((0, 1)) if ctx.has_bias else None)


mix.register_autograd(_backward, setup_context=_save)


def copied(name: str) -> Any:
    """The same operator under another name, whose rule is still free."""

    @torch.library.custom_op(f"test_own_rules::{name}", mutates_args=())
    def copy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.einsum("bhe,hef->bhf", x, weight)
        return out.clone() if bias is None else out + bias

    copy.register_autograd(_backward, setup_context=_save)
    return copy


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


SAMPLES = [
    (real(2, 4, 6), real(4, 6, 12), real(12)),
    ((real(3, 6, 4), real(6, 4, 2)), {"bias": None}),
    ((real(4, 2, 6), real(2, 6, 3)), {}),
]
TEXT = "b h e, h e f[, f] -> b h f"


def test_a_line_is_registered_and_proved() -> None:
    op = copied("right")
    autopar.register_rule(op, TEXT, additive=[2], linear=[[1]], flops=lambda n: 2.0 * n["e"])
    rule = rule_of(sample_of(torch.ops.test_own_rules.right.default, SAMPLES[1][0], {}).call)
    assert rule.known and rule.reduced == {"e"} and rule.factor_flops() == 8.0
    with pytest.raises(VerificationError, match=r"right\.default \['P:0'\]"):
        autopar.prove_rule(op, SAMPLES)  # linear in the weight only where there is no bias
    found = copied("right_too")
    register_rule(found, TEXT, additive=[2])
    proof = prove_rule(torch.ops.test_own_rules.right_too, SAMPLES)
    assert set(proof.splits) == {"b", "h", "e", "f"} and min(proof.splits.values()) >= 2
    assert proof.backward and not proof.whole
    assert str(proof).startswith("test_own_rules.right_too.default: proved ")


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        (
            "swapped",
            "b h e, e h f[, f] -> b h f",
            {"additive": [2]},
            "the operator does not take its shards",
        ),
        ("added", TEXT, {}, r"added\.default \['e\.0'\] over \[2\]: output differs"),
        ("renamed", "b h e, h e f[, g] -> b h f", {"additive": [2]}, r"renamed\.default \['(f|g)\.0'\]"),
    ],
)
def test_wrong_rules_are_disproved(name: str, text: str, options: Any, message: str) -> None:
    op = copied(name)
    register_rule(op, text, **options)
    with pytest.raises(VerificationError, match=message):
        prove_rule(op, [(real(6, 6, 6), real(6, 6, 6), real(6)), *SAMPLES])


def test_a_function_of_the_call() -> None:
    def by_bias(call: Call) -> Rule:
        if len(call.operands) == 3:
            raise RuleError("with a bias it is whole")
        return parse("b h e, h e f -> b h f", call, linear=[[0], [1]])

    op = copied("by_function")
    register_rule(op, by_bias)
    register_rule(op, by_bias)
    assert prove_rule(op, SAMPLES[1:]).backward
    with pytest.raises(RuleError, match="with a bias it is whole"):
        prove_rule(op, SAMPLES)
    with pytest.raises(RuleError, match="states whole, additive, linear and flops itself"):
        register_rule(copied("both"), by_bias, whole="e")


def test_the_same_again_is_welcome_and_another_is_refused() -> None:
    op = copied("twice")
    register_rule(op, TEXT, additive=[2], whole="e")
    register_rule(torch.ops.test_own_rules.twice.default, TEXT, additive=(2,), whole="e")
    with pytest.raises(RuleError, match=r"twice\.default already has a rule: 'b h e, h e f\[, f\] -> b h f'"):
        register_rule(op, TEXT, whole="e")
    with pytest.raises(RuleError, match="already has a rule"):
        register_rule(aten.mm.default, "m k, k n -> m n")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("b h e, h e f", {}, "write operands, '->' and the output"),
        ("b h e, h e f -> b h f, f", {}, "one output"),
        ("b (h e, h e f -> b h f", {}, "parentheses"),
        ("b h e, h (e f -> b h f)", {}, "parentheses"),
        ("b h e, h e f] -> b h f", {}, "may be missing"),
        ("b h-e, h e f -> b h f", {}, "'h-e' is no name of a factor"),
        ("b h h, h e f -> b h f", {}, "'h' stands twice in 'b h h'"),
        ("b h e, h e f -> b h g", {}, "'g' stands in the output only"),
        ("b h e -> b h e", {}, "it names 1 operands, the operator takes 2 to 3 tensors"),
        ("b h e, h e f, f, f -> b h f", {}, "it names 4 operands"),
        (TEXT, {"whole": "heads"}, "whole names 'heads', which is no factor"),
        (TEXT, {"additive": [3]}, "operand 3 does not exist"),
        (TEXT, {"linear": [[0], [-1]]}, "operand -1 does not exist"),
    ],
)
def test_malformed_lines_are_refused_at_registration(text: str, options: Any, message: str) -> None:
    with pytest.raises(RuleError, match="test_own_rules::mix") as caught:
        register_rule(mix, text, **options)
    assert message in str(caught.value) and text in str(caught.value)


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(RuleError, match="is no operator"):
        register_rule(torch.relu, "... -> ...")
    with pytest.raises(RuleError, match=r"several overloads; name the one .*aten\.add\.Tensor"):
        register_rule(aten.add, "..., ... -> ...")
    with pytest.raises(RuleError, match=r"changes an operand in place"):
        register_rule(aten.relu_.default, "... -> ...")
    with pytest.raises(RuleError, match="returns one tensor"):
        register_rule(aten.topk.default, "... n -> ... n")


def test_a_misfit_shows_pattern_shape_and_sizes() -> None:
    op = copied("misfit")
    register_rule(op, "b h e, e h f[, f] -> b h f")
    with pytest.raises(RuleError) as caught:
        prove_rule(op, SAMPLES[:1])
    text = str(caught.value)
    assert "'b h e, e h f[, f] -> b h f'" in text and "shape (4, 6, 12)" in text and "e = 6" in text


def test_samples_that_split_nothing_are_refused() -> None:
    op = copied("thin")
    register_rule(op, TEXT, additive=[2])
    with pytest.raises(VerificationError, match="no sample splits e; pass one"):  # a sum takes no padding
        prove_rule(op, [(real(5, 4, 7), real(4, 7, 7))])
    assert prove_rule(op, [(real(5, 4, 6), real(4, 6, 7))]).splits["b"]
    with pytest.raises(RuleError, match="nothing to prove"):
        prove_rule(op, [])
    with pytest.raises(RuleError, match="has no rule"):
        prove_rule(copied("without"), SAMPLES)
