"""A loop over the experts that tokens hit is refused. The remedy of docs/experts.md computes the same and is split."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from equivalence import case_of, check, labelled
from zoo import randomise

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.ir.sharding import Mesh


def dbrx() -> tuple[nn.Module, dict[str, Any]]:
    """A tiny DBRX whose tokens choose two of four experts, and a batch with ignored targets."""
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "max_seq_len": 64, "pad_token_id": 0}
    attention = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}
    config = AutoConfig.for_model("dbrx", **sizes, ffn_config=experts, attn_config=attention, use_cache=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomise(AutoModelForCausalLM.from_config(config).train())
        tokens = torch.randint(3, 64, (4, 16))
    labels = tokens.clone()
    labels[1, :5] = -100
    return model.double(), {"input_ids": tokens, "labels": labels}


def every_expert(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Every expert computes all tokens, times a weight that is zero for other tokens."""
    rows = hidden.reshape(-1, experts.hidden_size)
    w1, v1, w2 = (
        matrix.view(experts.num_experts, experts.ffn_hidden_size, experts.hidden_size)
        for matrix in (experts.mlp.w1, experts.mlp.v1, experts.mlp.w2)
    )
    out = torch.zeros_like(rows)
    for expert in range(experts.num_experts):
        weight = (weights * (chosen == expert)).sum(-1, keepdim=True)
        out = out + weight * experts.mlp(rows, w1[expert], v1[expert], w2[expert])
    return out.view(hidden.shape)


def test_a_loop_over_hit_experts_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"for expert_idx in expert_hit:.*docs/experts\.md"):
        capture_program(*dbrx())


def test_every_expert_for_all_tokens_computes_the_same_and_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.dbrx.modeling_dbrx import DbrxExperts

    model, inputs = dbrx()
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    monkeypatch.setattr(DbrxExperts, "forward", every_expert)
    case = case_of((model, inputs))
    assert case.program.mixes_batch is None
    torch.testing.assert_close(model(**inputs).loss, loss, rtol=1e-12, atol=0)
    model(**inputs).loss.backward()
    assert gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-12)
    for mesh in (Mesh.of(dp=2, tp=2), Mesh.of(tp=4)):
        check(case, labelled(case, mesh), mesh)
