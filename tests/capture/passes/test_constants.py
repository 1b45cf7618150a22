"""Constants: masks become `is_causal`, rotary tables are computed once, values do not depend on the device."""

import pytest
import tiny_models
import torch
from equivalence import case_of
from torch import nn

from autopar.capture.passes.constants import is_causal_mask
from autopar.capture.program import capture_program
from autopar.runtime.codegen.execute import constant_values

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default


def attention(model: str) -> list[tuple[object, ...]]:
    program = capture_program(*getattr(tiny_models, model)(2))
    return [n.args for b in program.blocks for n in b.graph.nodes if n.target is SDPA]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_causal_mask_is_recognised_by_value(model: str) -> None:
    calls = attention(model)
    assert len(calls) == 1  # layers are folded
    assert calls[0][3] is None
    assert calls[0][5] is True


class Attention(nn.Module):
    """One attention under a constant mask."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        ones = torch.ones(n, n, dtype=torch.bool)
        masks = {
            "causal": ones.tril(),
            "additive": torch.zeros(n, n).masked_fill(~ones.tril(), float("-inf")),
            "banded": ones.tril() & ones.triu(-2),
            "window": (torch.arange(n)[None] <= torch.arange(n)[:, None])
            & (torch.arange(n)[None] > torch.arange(n)[:, None] - 7),
            "wide": (torch.arange(n)[None] <= torch.arange(n)[:, None])
            & (torch.arange(n)[None] > torch.arange(n)[:, None] - 8),
            "strict": ones.tril(-1) | torch.eye(n, dtype=torch.bool).flip(0),
            "reversed": ones.triu(),
        }
        q = self.project(x)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=masks[self.mask]).square().sum()


@pytest.mark.parametrize("mask", ["causal", "additive", "banded", "window", "wide", "strict", "reversed"])
def test_only_causal_masks_are_replaced(mask: str) -> None:
    """A window of 7 does not show among the 6 tokens of the small capture, only among 8; one of 8 never does."""
    program = capture_program(Attention(mask), {"x": torch.zeros(2, 8, 4)})
    (call,) = [n for b in program.blocks for n in b.graph.nodes if n.target is SDPA]
    causal = len(call.args) > 5 and call.args[5] is True
    assert causal == (mask in ("causal", "additive", "wide"))
    assert (call.args[3:4] == (None,)) == causal


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (torch.ones(5, 5, dtype=torch.bool).tril(), True),
        (torch.ones(2, 1, 5, 5, dtype=torch.bool).tril(), True),
        (torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -3e38), True),
        (torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1.0), False),
        (torch.ones(5, 5, dtype=torch.bool), False),
        (torch.ones(5, 6, dtype=torch.bool).tril(), False),
        (torch.ones(1, 1, dtype=torch.bool), False),
    ],
)
def test_what_is_causal(mask: torch.Tensor, causal: bool) -> None:
    assert is_causal_mask(mask) == causal


def test_tables_are_constants_shared_by_layers() -> None:
    model, inputs = tiny_models.llama(2, layers=3)
    program = capture_program(model, inputs)
    layers = [c for c in program.calls if c.path.startswith("model.layers.")]
    assert len({c.block for c in layers}) == 1
    tables = [tuple(a for a in c.arguments if str(a).startswith("constant_")) for c in layers]
    assert len(set(tables)) == 1
    assert len(tables[0]) == 2  # cosine and sine
    values = constant_values(program.constants, dict(model.named_buffers()), "cpu")
    assert set(tables[0]) <= set(values)
    assert all(isinstance(v, torch.Tensor) and v.isfinite().all() for v in values.values())


def test_nothing_random_is_a_constant() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) + torch.dropout(torch.ones(4), 0.5, True)).sum()

    program = capture_program(Noisy(), {"x": torch.zeros(2, 4)})
    assert any(n.target is aten.dropout.default for b in program.blocks for n in b.graph.nodes)


class Rounded(nn.Module):
    """Two constants whose code differs in nothing but a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole, cut = (torch.full((4,), 3.7, dtype=dtype) for dtype in (torch.float64, torch.int64))
        return (self.weight * x * (whole - cut)).sum()


def test_constants_of_different_dtypes_stay_apart() -> None:
    example = Rounded(), {"x": torch.ones(3, 4, dtype=torch.float64)}
    torch.testing.assert_close(case_of(example).loss, torch.tensor(3 * 4 * 0.7, dtype=torch.float64))
