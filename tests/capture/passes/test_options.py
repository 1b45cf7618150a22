"""Options of operators that passes replace: each replaced operator runs with every option at another value."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from suites import thinned
from torch import nn

import autopar.capture.passes
from autopar.capture.request import Request
from autopar.testing.equivalence import run_model

PASSES = Path(autopar.capture.passes.__path__[0])
Calls = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
ones = torch.arange(1, 9).double()
square = torch.ones(6, 6, dtype=torch.bool).tril()

CALLS: dict[str, Calls] = {
    "native_dropout": lambda m, h, i: torch.native_dropout(h, 0.5, False)[0],
    "split_with_sizes": lambda m, h, i: torch.split(h, [3, 5], -1)[1],
    "chunk": lambda m, h, i: h.chunk(3, -1)[1],
    "tensor_split": lambda m, h, i: torch.tensor_split(h, (2, 5), -1)[1],
    "unbind": lambda m, h, i: h.unbind(-1)[2],
    "topk": lambda m, h, i: h.topk(3, 1, largest=False)[0],
    "sort": lambda m, h, i: torch.sort(h, stable=True, dim=1, descending=True)[0] * ones[:6, None],
    "max": lambda m, h, i: h.max(-1, keepdim=True)[0],
    "min": lambda m, h, i: h.min(1)[0],
    "kthvalue": lambda m, h, i: h.kthvalue(3, 1, keepdim=True)[0],
    "median": lambda m, h, i: h.median(1, keepdim=True)[0],
    "cummax": lambda m, h, i: h.cummax(1)[0],
    "var_mean": lambda m, h, i: torch.var_mean(h, -1, correction=0, keepdim=True)[0],
    "var_mean of all": lambda m, h, i: torch.var_mean(h, unbiased=False)[0] * h,
    "std_mean": lambda m, h, i: torch.std_mean(h, (1, 2), keepdim=True)[1] * h,
    "addmm": lambda m, h, i: torch.addmm(m.b, h.reshape(-1, 8), m.w, beta=3, alpha=0.5).view(4, 6, 8),
    "addmm of views": lambda m, h, i: torch.addmm(m.b, h.reshape(-1, 8), m.w).view(4, 6, 8),
    "linear": lambda m, h, i: torch.add(h @ m.w.t(), m.b, alpha=3),
    "add_": lambda m, h, i: (h @ m.w.t()).add_(m.b, alpha=3),
    "subtract": lambda m, h, i: torch.subtract(h, m.b, alpha=3),
    "divide": lambda m, h, i: torch.divide(h * 9, 2, rounding_mode="floor") + h,
    "addcmul_": lambda m, h, i: (h * 1).addcmul_(h, m.b, value=3),
    "threshold_": lambda m, h, i: F.threshold(h * 1, 0.2, 0.7, inplace=True),
    "clip_": lambda m, h, i: (h * 1).clip_(max=0.3),
    "index_add_": lambda m, h, i: (h * 1).index_add_(1, torch.tensor([1, 1]), h[:, :2], alpha=3),
    "index_put": lambda m, h, i: h.index_put((torch.tensor([0, 0]), torch.tensor([1, 1])), m.b, accumulate=True),
    "index_put with a mask": lambda m, h, i: h.index_put((h > 0,), ones[1]),
    "cross_entropy": lambda m, h, i: F.cross_entropy(h[:, 0], i[:, 0], ignore_index=2, label_smoothing=0.1),
    "cross_entropy of classes": lambda m, h, i: F.cross_entropy(h[:, 0], i[:, 0], ones, label_smoothing=0.1),
    "cross_entropy as a sum": lambda m, h, i: F.cross_entropy(h[:, 0], i[:, 0], ignore_index=1, reduction="sum"),
    "nll_loss": lambda m, h, i: F.nll_loss(h[:, 0].log_softmax(-1), i[:, 0], ones, ignore_index=2),
    "nll_loss2d": lambda m, h, i: F.nll_loss(h.mT.log_softmax(1)[..., :3], i, ones, ignore_index=2, reduction="sum"),
    "nll_loss_nd": lambda m, h, i: F.nll_loss(h.mT.log_softmax(1)[..., :3], i, ones, ignore_index=1),
    "pad": lambda m, h, i: F.pad(h, (1, 2), value=3.0),
    "pad that reflects": lambda m, h, i: F.pad(h, (1, 2), mode="reflect"),
    "new_full": lambda m, h, i: h.new_full((4, 6, 8), 3.0) * h,
    "new_ones": lambda m, h, i: h.new_ones((6, 8), dtype=torch.float32) * h,
    "full_like": lambda m, h, i: torch.full_like(h, 1.7, dtype=torch.int32) * h,
    "empty_like": lambda m, h, i: h * torch.empty_like(h, dtype=torch.float32).fill_(2.5),
    "normal_": lambda m, h, i: h + torch.empty_like(h).normal_(1.5, 0.0),
    "uniform_": lambda m, h, i: h + torch.empty_like(h).uniform_(2.0, 2.0),
    "bernoulli_": lambda m, h, i: h * torch.empty_like(h).bernoulli_(1.0),
    "to": lambda m, h, i: h.to(torch.float32, copy=True).double(),
    "batch_norm": lambda m, h, i: F.batch_norm(h.mT, m.mean, m.var, m.b, m.v, training=True, momentum=0.7, eps=0.3),
    "batch_norm in evaluation": lambda m, h, i: F.batch_norm(h.mT, m.mean, m.var, m.b, m.v, eps=0.3),
    "instance_norm": lambda m, h, i: F.instance_norm(h.mT, m.mean, m.var, m.b, m.v, momentum=0.6, eps=0.3),
    "instance_norm with statistics": lambda m, h, i: F.instance_norm(h.mT, m.mean, m.var, m.b, m.v, False, eps=0.3),
    "embedding": lambda m, h, i: F.embedding(i, m.e, padding_idx=2, scale_grad_by_freq=True) + h[:, :3],
    "embedding_bag": lambda m, h, i: F.embedding_bag(i, m.e, mode="mean", padding_idx=2) + h[:, 0],
    "embedding_bag with weights": lambda m, h, i: F.embedding_bag(i, m.e, mode="sum", per_sample_weights=h[:, 0, :3]),
    "embedding_bag with offsets": lambda m, h, i: F.embedding_bag(
        i.flatten(), m.e, torch.arange(0, 13, 3), mode="sum", include_last_offset=True
    ),
    "attention": lambda m, h, i: F.scaled_dot_product_attention(h, h, h, attn_mask=square, scale=0.7),
    "attention of groups": lambda m, h, i: F.scaled_dot_product_attention(
        h.view(4, 6, 4, 2).transpose(1, 2),
        *[h[..., k : k + 4].reshape(4, 6, 2, 2).transpose(1, 2) for k in (0, 4)],
        attn_mask=square,
        enable_gqa=True,
    ),
    "histc": lambda m, h, i: h * torch.histc(i.double(), bins=8, min=0, max=4),
    "gru_cell": lambda m, h, i: torch.gru_cell(h[:, 0], h[:, 1], *[torch.cat([w] * 3) for w in (m.w, m.w, m.b, m.v)]),
    "scatter": lambda m, h, i: h.scatter_reduce(
        1, i[:, :, None].expand(4, 3, 8), h[:, :3] * 2, "amax", include_self=False
    ),
}
# operators that a pass writes or looks for, and that lose no option: they have none that a number depends on
_PLAIN = """
    _assert_scalar _assert_tensor_metadata _unsafe_view alias contiguous detach lift_fresh lift_fresh_copy clone copy
    fill zero reshape reshape_as view view_as expand slice select narrow transpose t numpy_T unsqueeze squeeze flatten
    sym_constrain_range_for_size stack cat where ne eq mul div sub rsub add relu tanh sigmoid rsqrt sum mean clamp
    ones_like zeros_like zeros full arange bucketize gather scatter_add index_add dropout constant_pad_nd linear mm
    matmul maximum minimum argsort _to_copy empty new_empty new_zeros _grouped_mm lstm_cell rnn_tanh_cell rnn_relu_cell
    lt masked_fill square logical_not index var std clamp_min permute sqrt as_strided index_select
    select_scatter slice_scatter
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
"""
WITHOUT_OPTIONS = frozenset(_PLAIN.split())


class Calling(nn.Module):
    def __init__(self, function: Calls) -> None:
        super().__init__()
        self.function = function
        for name, shape in {"w": (8, 8), "e": (5, 8), "b": (8,), "v": (8,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("var", torch.rand(8) + 1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.function(self, x @ self.w, ids).square().mean()
        return loss


@pytest.mark.parametrize("name", thinned(CALLS, keep=["native_dropout", "linear", "normal_", "embedding", "var_mean"]))
def test_an_option_has_the_value_that_the_model_gives(name: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 6, 8, dtype=torch.float64), torch.randint(5, (4, 3))
    model = Calling(CALLS[name]).double()
    found = run_model(Request.of(model, batch))
    loss = model(*batch)
    loss.backward()
    torch.testing.assert_close(found.loss.detach(), loss.detach())
    torch.testing.assert_close(found.gradients, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(found.updates, {n: b for n, b in model.named_buffers() if n in found.updates})


def test_every_operator_of_every_pass_is_here() -> None:
    named = set()
    for file in PASSES.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                inner = node.value
                if isinstance(inner.value, ast.Name) and inner.value.id == "aten":
                    named.add(inner.attr.removesuffix("_"))
    tested = {name.split()[0].removesuffix("_") for name in CALLS}
    tested |= {"cross_entropy_loss", "scaled_dot_product_attention"}
    assert named - tested - WITHOUT_OPTIONS == set()
