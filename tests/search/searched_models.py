"""A small Llama on meta, its inputs, and a cluster with little memory: what tests of `autopar.plan` search."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.ir.cluster import ClusterSpec

LAYERS, SEQUENCE, BATCH = 4, 64, 16


def model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        made: nn.Module = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    return made


def tokens(batch: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.empty(batch, SEQUENCE, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


def small(memory_bytes: float) -> ClusterSpec:
    """Four devices with little memory."""
    spec = ClusterSpec.preset("4xh100")
    groups = tuple(replace(one, device=replace(one.device, memory_bytes=memory_bytes)) for one in spec.groups)
    return replace(spec, groups=groups)
