"""Transformers models whose queries, keys and values lie in one projection and are of different sizes."""

from tiny_models import Example, seeded

SEQUENCE, VOCABULARY = 8, 24


def phi3(layers: int = 2, *, batch: int = 4) -> Example:
    """``q | k | v`` of 4, 2 and 2 heads, cut by slices."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    return seeded(Phi3ForCausalLM, config, batch, SEQUENCE, VOCABULARY)


def falcon(layers: int = 2, *, batch: int = 4, new: bool = False) -> Example:
    """(heads + 2, head_dim) cut by lists of indices; the new architecture has 2 groups of (2 + 2, head_dim)."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_kv_heads=2,
        multi_query=not new,
        new_decoder_architecture=new,
        vocab_size=VOCABULARY,
        bias=True,
    )
    return seeded(FalconForCausalLM, config, batch, SEQUENCE, VOCABULARY)


def falcon_grouped(layers: int = 2, *, batch: int = 4) -> Example:
    return falcon(layers, batch=batch, new=True)


def bigcode(layers: int = 2, *, batch: int = 4) -> Example:
    """4 heads of queries, one of keys and one of values, cut by a split behind an unsqueeze."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    config = GPTBigCodeConfig(
        n_embd=32,
        n_layer=layers,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=2 * SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return seeded(GPTBigCodeForCausalLM, config, batch, SEQUENCE, VOCABULARY)
