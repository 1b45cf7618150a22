"""Routing to experts, whole and in shards. Rows lie in another order on every rank: the operators are proved together.

The region is order -> rows -> product -> pointwise -> product -> take, untake and sum. Whole, it runs on all tokens. In
shards, every rank runs it on its part of the tokens, or on its part of the experts' width.
"""

from collections.abc import Callable

import pytest
import torch

from autopar.ir.sharding import P, R, S
from autopar.rules.registry import rule_of
from autopar.rules.routed import ORDER, PRODUCT, ROUTED, ROWS, TAKE, UNTAKE
from autopar.rules.variants import split_variants
from autopar.testing.rule_proof import bind_factors, sample_of

BATCH, SEQUENCE, HIDDEN, WIDTH, EXPERTS, CHOICES = 6, 6, 5, 12, 4, 2
Tensors = tuple[torch.Tensor, ...]  # tokens (t, d), experts (t, k), weights (t, k), up (e, d, w), down (e, w, d)


def region(
    x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    k = expert.shape[1]
    order = ORDER(expert)
    sorted_expert = TAKE(expert.reshape(-1), order, k)
    hidden = torch.tanh(PRODUCT(ROWS(x, order, k), up, sorted_expert, k))
    out = PRODUCT(hidden, down, sorted_expert, k) * TAKE(weight.reshape(-1), order, k)[:, None]
    return UNTAKE(out, order, k).reshape(len(x), k, -1).sum(1)


def by_hand(
    x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    rows = torch.tanh(torch.einsum("td,tkdw->tkw", x, up[expert]))
    return torch.einsum("tkw,tkwd,tk->td", rows, down[expert], weight)


def routed_at_random(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(BATCH * SEQUENCE, EXPERTS, generator=generator).argsort(1)[:, :CHOICES]


def with_an_empty_expert(generator: torch.Generator) -> torch.Tensor:
    chosen = torch.rand(BATCH * SEQUENCE, EXPERTS - 1, generator=generator).argsort(1)[:, :CHOICES]
    return chosen + (chosen >= 1)  # nobody chooses expert 1


def all_to_one(generator: torch.Generator) -> torch.Tensor:
    return torch.full((BATCH * SEQUENCE, CHOICES), 2)


ROUTINGS = {"random": routed_at_random, "empty": with_an_empty_expert, "one": all_to_one}


def drawn(routing: Callable[[torch.Generator], torch.Tensor]) -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = BATCH * SEQUENCE
    chosen = routing(generator)
    return (
        real(tokens, HIDDEN),
        chosen,
        real(tokens, CHOICES),
        real(EXPERTS, HIDDEN, WIDTH),
        real(EXPERTS, WIDTH, HIDDEN),
    )


def run(tensors: Tensors, cotangent: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and the gradients of tokens, weights and matrices."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    out = region(*leaves)
    out.backward(cotangent)
    return out.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def parts(tensor: torch.Tensor, dim: int, degree: int) -> list[torch.Tensor]:
    """The tokens of every rank if the batch or the sequence is split; `dim` is 0 or 1."""
    of_batch = tensor.unflatten(0, (BATCH, SEQUENCE))
    return [part.flatten(0, 1) for part in of_batch.chunk(degree, dim)]


def joined(found: list[torch.Tensor], dim: int) -> torch.Tensor:
    shape = (-1, SEQUENCE) if dim == 0 else (BATCH, -1)
    return torch.cat([part.unflatten(0, shape) for part in found], dim).flatten(0, 1)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_whole_is_every_token_times_its_experts(routing: str) -> None:
    tensors = drawn(ROUTINGS[routing])
    torch.testing.assert_close(region(*tensors), by_hand(*tensors))
    chosen = tensors[1]
    for operator, arguments in ((ORDER, (chosen,)), (TAKE, (tensors[2].reshape(-1), ORDER(chosen), CHOICES))):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    small = [tensors[0][:3], chosen[:3], tensors[2][:3], *tensors[3:]]
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in small]
    assert torch.autograd.gradcheck(region, leaves)


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_ranks_with_some_tokens(routing: str, dim: int, degree: int) -> None:
    """Outputs and gradients of tokens are put together; gradients of matrices are summed."""
    tensors = drawn(ROUTINGS[routing])
    cotangent = torch.randn_like(tensors[0])
    out, (of_x, of_weight, of_up, of_down) = run(tensors, cotangent)
    cut = [parts(t, dim, degree) for t in (*tensors[:3], cotangent)]
    ranks = [run((x, chosen, weight, *tensors[3:]), g) for x, chosen, weight, g in zip(*cut, strict=True)]
    torch.testing.assert_close(joined([o for o, _ in ranks], dim), out)
    torch.testing.assert_close(joined([grads[0] for _, grads in ranks], dim), of_x)
    torch.testing.assert_close(joined([grads[1] for _, grads in ranks], dim), of_weight)
    torch.testing.assert_close(sum(grads[2] for _, grads in ranks), of_up)
    torch.testing.assert_close(sum(grads[3] for _, grads in ranks), of_down)


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_ranks_with_some_of_the_width(routing: str, degree: int) -> None:
    """The first product splits n, the second k, whose results are partial sums."""
    tensors = drawn(ROUTINGS[routing])
    cotangent = torch.randn_like(tensors[0])
    out, (of_x, of_weight, of_up, of_down) = run(tensors, cotangent)
    widths = zip(tensors[3].chunk(degree, 2), tensors[4].chunk(degree, 1), strict=True)
    ranks = [run((*tensors[:3], up, down), cotangent) for up, down in widths]
    torch.testing.assert_close(sum(o for o, _ in ranks), out)
    torch.testing.assert_close(sum(grads[0] for _, grads in ranks), of_x)
    torch.testing.assert_close(sum(grads[1] for _, grads in ranks), of_weight)
    torch.testing.assert_close(torch.cat([grads[2] for _, grads in ranks], 2), of_up)
    torch.testing.assert_close(torch.cat([grads[3] for _, grads in ranks], 1), of_down)


def test_tokens_are_split_alike_by_every_operator() -> None:
    """The choices of a token stay together, and matrices are whole where tokens are split."""
    x, chosen, weight, up, _ = drawn(routed_at_random)
    order = ORDER(chosen)
    rows, expert = ROWS(x, order, CHOICES), TAKE(chosen.reshape(-1), order, CHOICES)
    calls = {
        ORDER: (chosen,), ROWS: (x, order, CHOICES), TAKE: (weight.reshape(-1), order, CHOICES),
        UNTAKE: (rows, order, CHOICES), PRODUCT: (rows, up, expert, CHOICES),
    }  # fmt: skip
    assert set(calls) == set(ROUTED)
    for target, arguments in calls.items():
        rule = rule_of(sample_of(target, arguments, {}).call)
        assert "j" in rule.whole and "t" in rule.even, target
        of_tokens = [v for v in split_variants(bind_factors(rule, None), 2) if v.factor == "t"]
        assert [v.output for v in of_tokens] == [S(0)], target
        wanted = {(S(0), R, S(0))} if target is PRODUCT else {(S(0),) * len(rule.inputs)}
        assert {v.operands for v in of_tokens} == wanted, target
    product = rule_of(sample_of(PRODUCT, calls[PRODUCT], {}).call)
    assert "e" in product.whole
    assert [v.output for v in split_variants(bind_factors(product, None), 2) if v.factor == "n"] == [S(1)]
    odd = drawn(routed_at_random)
    product = rule_of(sample_of(PRODUCT, (hidden_rows(odd), odd[4], expert, CHOICES), {}).call)
    assert [v.output for v in split_variants(bind_factors(product, None), 2) if v.factor == "k"] == [P]
    assert product.factor_flops() == 2 * BATCH * SEQUENCE * CHOICES * WIDTH * HIDDEN


def hidden_rows(tensors: Tensors) -> torch.Tensor:
    return torch.randn(BATCH * SEQUENCE * CHOICES, WIDTH, dtype=torch.float64)
