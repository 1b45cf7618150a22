"""Random operators draw element by element. The choice of each rank's generator is not made here."""

from autopar._torch.operators import aten
from autopar.rules.families._notation import broadcast, dims, rule_from
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Rule

# position and name of the probability with which an operator drops elements; None where it always draws
RANDOM: dict[object, tuple[int, str] | None] = {
    aten.dropout.default: (1, "p"),
    aten.scaled_dot_product_attention.default: (4, "dropout_p"),
    aten.bernoulli.default: None,
    aten.bernoulli.p: None,
    aten.rand_like.default: None,
    aten.randn_like.default: None,
}


def is_random(call: Call) -> bool:
    """Does the call draw random numbers?"""
    if call.target not in RANDOM:
        return False
    probability = RANDOM[call.target]
    if probability is None:
        return True
    if call.target is aten.dropout.default and not call.arg(2, "train"):
        return False
    return bool(call.arg(*probability, 0.0) != 0)


@rule(
    aten.dropout.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.rand_like.default,
    aten.randn_like.default,
)
def drawn_per_element(call: Call) -> Rule:
    spec = dims(call.output.shape)
    return rule_from(call, broadcast(call, spec), spec)
