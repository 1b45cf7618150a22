"""Splits that published sizes ask for: experts multiplied in groups, and heads over two mesh dimensions."""

import pytest

pytest.importorskip("transformers")

import torch
import zoo
from equivalence import case_of, check, check_random, labelled

from autopar.cost_model.work.coverage import coverage
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.models.load import resolve_model
from autopar.rules.routed import PRODUCT


def test_experts_in_groups_split_by_their_width() -> None:
    """A model in float32 multiplies its experts in groups; the captured program is promoted to float64."""
    found = resolve_model("mixtral-8x7b", layers=2, hidden=32, seq_len=8, batch=2, device="cpu")
    case = case_of((zoo.randomise(found.model), dict(found.example_inputs)))
    assert any(node.target is PRODUCT for block in case.program.blocks for node in block.graph.nodes)
    degrees = Degrees(tp=4)
    labels = labelled(case, degrees.mesh)
    check(case, labels, degrees.mesh)
    check_random(case, degrees.mesh, 0)
    split = coverage(case.program, case.analysis(degrees.mesh), labels, degrees, ClusterSpec.preset("4xh100"))
    assert split.split_flops("tp") >= 0.95, split.whole

    batched = resolve_model("mixtral-8x7b", layers=2, hidden=32, dtype="float64", device="cpu").model
    batched.load_state_dict(found.model.state_dict())
    loss = batched(**found.example_inputs).loss
    torch.testing.assert_close(loss.detach().double(), case.loss, rtol=1e-5, atol=0)  # its logits are float32


def test_six_heads_over_two_by_two_ranks() -> None:
    """Attention is split by the first mesh dimension, products with weights by both."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_embd=48, n_layer=2, n_head=6, vocab_size=50, n_positions=16, **dropouts)
    ids = torch.arange(32).reshape(2, 16) % 50
    case = case_of((zoo.randomise(GPT2LMHeadModel(config).double()), {"input_ids": ids, "labels": ids}))
    degrees = Degrees(tp=4, tp_dims=(2, 2))
    check(case, labelled(case, degrees.mesh), degrees.mesh)
