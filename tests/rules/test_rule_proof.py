"""Every registered rule, proved by running its operator whole and in shards on drawn calls."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from rule_draws import FEW_POINTWISE, draw_sample
from suites import SHORT as SUITE
from suites import thinned
from torch.utils.flop_counter import FlopCounterMode

from autopar.rules.families.pointwise import OPERATORS
from autopar.rules.registry import registered, rule_of
from autopar.rules.routed import ORDER, ROUTED
from autopar.rules.rule import Step
from autopar.rules.scaled_product import SCALED_LINEAR
from autopar.testing.rule_proof import prove, prove_rule, run_steps, sample_of

aten = torch.ops.aten
# eight bits round whole and split operands differently: test_scaled_product.py takes values that stay as they are
TARGETS = sorted((target for target in registered() if target is not SCALED_LINEAR), key=str)
NUM_DRAWS = 16
NUM_POINTWISE_DRAWS = 7
ENOUGH_DRAWS = 6  # of the short suite, if they split every dimension that the rule names
# values depend on position, or a partial result means nothing: nothing is ever split
NEVER_SPLIT = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.eye.default,
    aten.eye.m, aten.scalar_tensor.default, aten.max.default, aten.min.default, aten.any.default, aten.all.default,
    aten.prod.default, aten.logspace.default, aten.tril_indices.default, aten.triu_indices.default,
    ORDER, aten.hann_window.default, aten.hann_window.periodic, aten.hamming_window.default, aten.randperm.default,
}  # fmt: skip


def _is_in_short_suite(target: Any) -> bool:
    name = str(target).split(".")[1]
    return name in FEW_POINTWISE or name not in OPERATORS


# one overload of each operator, and few of the pointwise operators
SHORT = {target.overloadpacket: target for target in TARGETS if _is_in_short_suite(target)}


@pytest.mark.parametrize("target", thinned(TARGETS, keep=SHORT.values()), ids=str)
def test_rule_holds_in_shards(target: Any, pytestconfig: pytest.Config) -> None:
    is_short = pytestconfig.getoption("markexpr") == SUITE
    pointwise = str(target).split(".")[1] in OPERATORS
    proved = known = 0
    named: set[str] = set()
    split: set[tuple[str, int]] = set()
    for number in range(NUM_POINTWISE_DRAWS if pointwise else NUM_DRAWS):
        sample, rng = draw_sample(target, number)
        rule = rule_of(sample.call)
        if target in ROUTED:  # ranks sort rows of their own: test_routed_region.py splits the tokens of all together
            rule = replace(rule, whole=rule.whole | {"t"})
        known += rule.known
        found = prove(sample, rule, rng)
        proved += len(found)
        split |= found
        named |= rule.sizes.keys() - rule.whole - rule.outermost
        inner, missing = {factor for factor, axis in split if axis}, named - {factor for factor, _ in split}
        if is_short and number >= ENOUGH_DRAWS and inner and not missing:
            break
    assert known, f"no drawn call of {target} has a rule"
    assert (proved > 0) != (target in NEVER_SPLIT), f"{proved} shardings proved for {target}"
    assert not missing, f"no draw of {target} splits {sorted(missing)}"
    assert inner or target in NEVER_SPLIT, f"no draw of {target} splits the inner axis of a product"


OPTIONAL = (aten.conv1d.padding, aten.conv2d.default, aten.sum.dim_IntList, aten.slice.Tensor, aten.softmax.int)


@pytest.mark.parametrize(
    "target", thinned([t for t in TARGETS if hasattr(t, "_schema") and t not in ROUTED], keep=OPTIONAL), ids=str
)
def test_optional_arguments_are_left_out_or_given_by_name(target: Any) -> None:
    declared = target._schema.arguments
    required = next((i for i, a in enumerate(declared) if a.has_default_value()), len(declared))
    for number in range(6):
        sample, rng = draw_sample(target, number)
        args, kwargs = list(sample.call.args), dict(sample.call.kwargs)
        named = {a.name: value for a, value in zip(declared[required:], args[required:], strict=False)}
        while len(args) > required and repr(args[-1]) == repr(declared[len(args) - 1].default_value):
            args.pop()
        for other in (
            replace(sample.call, args=tuple(args)),
            replace(sample.call, args=tuple(args[:required]), kwargs=kwargs | named),
        ):
            rule, expected = rule_of(other), rule_of(sample.call)
            assert (rule.inputs, rule.output, rule.whole) == (expected.inputs, expected.output, expected.whole)
            prove(replace(sample, call=other), rule, rng)


def _empty(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


WITHOUT_ELEMENTS = {
    aten.full_like.default: (_empty(4, 0, 6), 0.0),
    aten.new_full.default: (_empty(4, 0, 6), [4, 0, 6], 0.0),
    aten.unsqueeze.default: (_empty(4, 0, 6), 1),
    aten.squeeze.dim: (_empty(4, 1, 0, 6), 1),
    aten.reshape.default: (_empty(4, 0, 6), [4, 0, 2, 3]),
    aten.transpose.int: (_empty(4, 0, 6), 0, 1),
    aten.expand.default: (_empty(4, 1, 0, 6), [4, 2, 0, 6]),
    aten.add.Tensor: (_empty(4, 0, 6), _empty(1, 6)),
    aten.cat.default: ([_empty(4, 0, 6), torch.randn(4, 3, 6).double()], 1),
    aten.slice.Tensor: (torch.randn(4, 3, 6).double(), 1, 0, 0),
    aten.sum.dim_IntList: (_empty(4, 0, 6), [1]),
    aten.linear.default: (_empty(4, 0, 6), torch.randn(2, 6).double()),
}


@pytest.mark.parametrize("target", WITHOUT_ELEMENTS, ids=str)
def test_a_dimension_without_elements_is_whole_and_the_others_are_split(target: Any) -> None:
    """Caches and pools of a model may be empty at short lengths, beside a batch that is split."""
    proof = prove_rule(target, [WITHOUT_ELEMENTS[target]])
    assert proof.splits, proof


def test_a_reshape_without_elements_may_move_them() -> None:
    rule = rule_of(sample_of(aten.reshape.default, (_empty(4, 0, 6), [4, 6, 0]), {}).call)
    assert rule.known and [factor for factor in rule.sizes if factor not in rule.whole] == ["r0"]


def test_an_operator_without_a_sample_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"add a sample for aten\.bincount"):
        draw_sample(aten.bincount.default, 0)


@pytest.mark.parametrize(
    "target",
    [
        aten.linear.default, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default,
        aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv_transpose1d.default,
        aten.conv_transpose2d.input, aten.conv_transpose3d.input, aten.scaled_dot_product_attention.default,
    ],
    ids=str,
)  # fmt: skip
def test_flops_are_those_torch_counts(target: Any) -> None:
    for number in range(4):
        sample, _ = draw_sample(target, number)
        with FlopCounterMode(display=False) as counter:
            run_steps((Step(target, sample.call.args, sample.call.kwargs),), sample.tensors)
        assert rule_of(sample.call).factor_flops() == counter.get_total_flops()
