"""Functions that ranks run in test_context: causal attention of split queries, and batches that differ."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.errors import RuntimeInputError
from autopar.ir.sharding import Mesh
from autopar.lowering.context_attention import causal_attention
from autopar.lowering.ring_attention import ring_attention
from autopar.runtime.distributed.mesh import make_mesh


def attended(rank: int, tokens: int, key_heads: int) -> tuple[float, int]:
    """The largest error of the result and of all gradients of a rank, and the FLOP of its forward pass."""
    torch.manual_seed(0)
    world = torch.distributed.get_world_size()
    mesh = make_mesh(Mesh.of(cp=world)).dims["cp"]
    whole = [torch.randn(2, heads, tokens, 8, dtype=torch.float64) for heads in (4, key_heads, key_heads)]
    cotangent = torch.randn(2, 4, tokens, 8, dtype=torch.float64)
    expected = [one.clone().requires_grad_() for one in whole]
    out = scaled_dot_product_attention(*expected, is_causal=True, enable_gqa=key_heads < 4)
    out.backward(cotangent)
    own = slice(rank * tokens // world, (rank + 1) * tokens // world)
    query, key, value = whole[0][:, :, own].clone().requires_grad_(), *(t.clone().requires_grad_() for t in whole[1:])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        found = causal_attention(query, key, value, None, key_heads < 4, mesh)
    found.backward(cotangent[:, :, own])
    errors = [float((found - out[:, :, own]).abs().max())]
    assert query.grad is not None and expected[0].grad is not None
    errors.append(float((query.grad - expected[0].grad[:, :, own]).abs().max()))
    for one, reference in ((key, expected[1]), (value, expected[2])):
        assert one.grad is not None and reference.grad is not None
        torch.distributed.all_reduce(one.grad)  # every rank has the part of its queries
        errors.append(float((one.grad - reference.grad).abs().max()))
    return max(errors), counter.get_total_flops()


def ringed(rank: int, tokens: int, key_heads: int, causal: bool, width: int) -> tuple[float, int]:
    """The largest error of ring attention's result and of all gradients of a rank, and the FLOP of its forward pass.

    Values have `width` numbers, queries and keys 8.
    """
    torch.manual_seed(0)
    world = torch.distributed.get_world_size()
    mesh = make_mesh(Mesh.of(cp=world)).dims["cp"]
    shapes = ((2, 4, tokens, 8), (2, key_heads, tokens, 8), (2, key_heads, tokens, width))
    whole = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    cotangent = torch.randn(2, 4, tokens, width, dtype=torch.float64)
    expected = [one.clone().requires_grad_() for one in whole]
    out = scaled_dot_product_attention(*expected, is_causal=causal, enable_gqa=key_heads < 4, scale=0.7)
    out.backward(cotangent)
    own = slice(rank * tokens // world, (rank + 1) * tokens // world)
    parts = [one[:, :, own].clone().requires_grad_() for one in whole]
    with FlopCounterMode(display=False) as counter:
        found = ring_attention(*parts, causal, 0.7, mesh)
    found.backward(cotangent[:, :, own])
    pairs = [(found, out[:, :, own])]
    pairs += [(one.grad, reference.grad[:, :, own]) for one, reference in zip(parts, expected, strict=True)]
    return max(float((one - reference).detach().abs().max()) for one, reference in pairs), counter.get_total_flops()


def other_data(rank: int) -> str:
    """The message of a step in which the ranks of a sequence have different tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes))
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": ids, "labels": ids}
    parallel = autopar.parallelize(model, "4xcpu", example_inputs=batch, plan={"cp": 2, "dp": 2})
    try:
        parallel.forward_backward(batch)
    except RuntimeInputError as error:
        return str(error)
    return ""


def packed() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A Llama on sequences of three documents. A mask keeps tokens from other documents."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens, documents = 24, torch.arange(24) // 10
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, num_key_value_heads=2, **sizes))
    ids = torch.randint(64, (4, tokens))
    sees = (documents[:, None] == documents) & (torch.arange(tokens)[:, None] >= torch.arange(tokens))
    mask = sees.expand(4, 1, tokens, tokens).clone()
    places = (torch.arange(tokens) % 10).expand(4, tokens).clone()
    return model, {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask, "position_ids": places}


def scanned() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A Mamba, which transformers computes token by token on a CPU."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, use_mambapy=False, use_cache=False)
    ids = torch.randint(64, (2, 16))
    return MambaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}
