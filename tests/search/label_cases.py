"""Models on meta, labelled; cached, because many tests look at the same labels."""

from functools import cache

import torch
from listed_conversions import ListedConversion, listed_conversions

from autopar.capture.analysis import Analysis, analyse
from autopar.capture.program import capture_program
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.ir.sharding import Type
from autopar.search.labels.result import Labelling
from autopar.search.labels.solve import label

LAYERS = {"llama": "model.layers.0", "gpt2": "transformer.h.0"}


@cache
def program_of(model: str, layers: int = 2, heads: int = 8, vocabulary: int = 160, batch: int = 4) -> Program:
    """A tiny model; Llama and Mixtral have grouped queries, GPT-2 a packed projection and a tied table."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    tokens = torch.zeros(batch, 16, dtype=torch.long, device="meta")
    with torch.device("meta"):
        if model == "gpt2":
            found = GPT2LMHeadModel(
                GPT2Config(n_embd=8 * heads, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=32)
            )
        else:
            kind, config = (
                (MixtralForCausalLM, MixtralConfig) if model == "mixtral" else (LlamaForCausalLM, LlamaConfig)
            )
            found = kind(
                config(
                    hidden_size=8 * heads,
                    intermediate_size=96,
                    num_hidden_layers=layers,
                    num_attention_heads=heads,
                    num_key_value_heads=heads // 2,
                    vocab_size=vocabulary,
                )
            )
    return capture_program(found, {"input_ids": tokens, "labels": tokens})


@cache
def analysis_of(model: str, layers: int = 2) -> Analysis:
    return analyse(program_of(model, layers))


@cache
def labelled(model: str, degrees: Degrees, layers: int = 2, cluster: str = "4xcpu") -> Labelling:
    return label(program_of(model, layers), analysis_of(model, layers), degrees, ClusterSpec.preset(cluster))


def block_of(found: Labelling, name: str) -> BlockLabels:
    return next(b for b in found.blocks if b.name == name)


def port(found: Labelling, block: str, name: str, dim: int = 1) -> Type:
    return block_of(found, block).ports[name][dim]


def operator(found: Labelling, block: str, key: str, dim: int = 1) -> str:
    return block_of(found, block).labels[key][dim]


def in_block(model: str, found: Labelling, block: str, mesh_dim: str = "tp") -> list[ListedConversion]:
    """Conversions of one block on one mesh dimension that send something."""
    program = program_of(model)
    every = listed_conversions(program, analysis_of(model), found.blocks, found.mesh)
    return [
        c
        for c in every
        if program.blocks[c.block].name == block and c.mesh_dim == mesh_dim and (c.forward or c.backward)
    ]
