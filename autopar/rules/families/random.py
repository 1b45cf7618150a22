"""Random operators draw element by element. The choice of each rank's generator is not made here."""

from autopar._torch.operators import aten
from autopar.rules.families._notation import dims, rule_from
from autopar.rules.families.create import sized
from autopar.rules.families.pointwise import pointwise
from autopar.rules.registry import Pattern, rule
from autopar.rules.rule import Call, Rule

PER_ELEMENT = (
    aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor,
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
    aten.exponential.default, aten.uniform.default, aten.normal_functional.default, aten.log_normal.default,
    aten.cauchy.default, aten.geometric.default, aten.random.default, aten.random.to, getattr(aten.random, "from"),
    aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor, aten.poisson.default,
)  # fmt: skip
OF_SHAPE = {aten.rand.default: 0, aten.randn.default: 0, aten.randint.default: 1, aten.randint.low: 2}
DROPS = frozenset({
    aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default, aten.feature_alpha_dropout.default,
    aten.scaled_dot_product_attention.default,
})  # fmt: skip
ALWAYS = frozenset({*PER_ELEMENT, *OF_SHAPE, aten.multinomial.default, aten.randperm.default})


def draws_numbers(call: Call) -> bool:
    """Does the call draw random numbers?"""
    if call.target not in DROPS:
        return call.target in ALWAYS
    return bool(call.named("train", True) and call.named("dropout_p", call.named("p")) != 0)


rule(aten.dropout.default, aten.alpha_dropout.default, *PER_ELEMENT)(pointwise)


@rule(*OF_SHAPE)
def drawn_of_shape(call: Call) -> Rule:
    """Any part of a tensor of independent numbers is one too."""
    return sized(call, OF_SHAPE[call.target])


@rule(aten.feature_dropout.default, aten.feature_alpha_dropout.default)
def feature_dropout(call: Call) -> Rule:
    """One draw per sample and channel: places are whole."""
    spec = dims(call.output.shape)
    return rule_from(call, [spec], spec, whole={f for dim in spec[2:] for f in dim})


rule(aten.multinomial.default)(Pattern("... k -> ... s", whole="k s"))
