"""Operators that transformers lack: split, and equal to one device in one process and on gloo ranks."""

import pytest
import torch
from operator_models import BATCH, BETWEEN, TOKENS, made
from random_labels import check_random_labels
from suites import long, thinned
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autopar.capture.analysis import analyse
from autopar.capture.export.flexible_attention import flexible_attention
from autopar.capture.program import capture_program
from autopar.commands.verify import verify
from autopar.ir.sharding import Mesh
from autopar.runtime.distributed.launch import Ranks
from autopar.testing import check_equivalence


@pytest.mark.parametrize("name", thinned(BETWEEN, keep=list(BETWEEN)[::2]))
def test_equal_to_one_device(name: str) -> None:
    check_equivalence(*made(name), tp=2, dp=2)


@pytest.mark.parametrize("name", thinned(BETWEEN, keep=list(BETWEEN)[::8]))
def test_other_labels_are_equal_to_one_device(name: str) -> None:
    model, inputs = made(name)
    check_equivalence(model, inputs, tp=2)
    check_random_labels(model, inputs, tp=2)


@pytest.mark.parametrize("name", thinned(BETWEEN, keep=list(BETWEEN)[::4]))
def test_every_operator_has_a_rule_that_splits_the_batch(name: str) -> None:
    program = capture_program(*made(name))
    analysis = analyse(program, Mesh.of(dp=1, tp=2))
    without = [key for bounds in analysis.bounds for key, bound in bounds.items() if not bound.rule.known]
    assert not without


@pytest.mark.parametrize("name", ["complex_rotation", long("fourier"), long("bags"), long("transposed_convolution")])
def test_on_gloo_ranks(name: str, four_ranks: Ranks) -> None:
    report = verify(
        f"operator_models:{name}_model", world_size=4, degrees={"tp": 2, "dp": 2}, ranks=four_ranks, steps=2
    )
    assert report.passed, report


@pytest.mark.parametrize("keys", [2, 4])
def test_attention_by_functions_is_that_of_torch(keys: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, n, TOKENS, 8) for n in (4, keys, keys))
    document = torch.arange(TOKENS) // 5
    mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (document[i] == document[j]), None, None, TOKENS, TOKENS, device="cpu"
    )
    slopes = torch.randn(4)

    def score(s, b, h, i, j):  # type: ignore[no-untyped-def]
        return s + slopes[h] * (i - j)

    expected = flex_attention(q, k, v, score_mod=score, block_mask=mask, scale=0.4, enable_gqa=True)
    found, _, _ = flexible_attention(q, k, v, score, mask.as_tuple(), 0.4)
    torch.testing.assert_close(found, expected)


def test_a_row_without_keys_is_zero_and_has_a_gradient() -> None:
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64, requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: i > j, None, None, 4, 4, device="cpu")
    out, _, _ = flexible_attention(q, q, q, lambda s, b, h, i, j: s, mask.as_tuple(), 1.0)
    out.square().sum().backward()
    assert not out[0, 0, 0].any()
    assert q.grad is not None
    assert q.grad.isfinite().all()
