"""autopar's tensor parallelism against torch's `parallelize_module` (DTensor): python benchmarks/tensor_parallel.py

Both have the same Llama and gloo ranks. By hand it has column and row parallel styles, a sharded vocabulary and
`loss_parallel`. A step is forward and backward of one batch. Prints seconds per step, the ratio of paired rounds with
its interval, and the peak of resident memory in a step, each in its own world.
"""

from typing import Any

import torch
from paired import Programs, Step, by_autopar, main
from torch.distributed.device_mesh import init_device_mesh

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 8192}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
BATCH, SEQUENCE = 2, 256


def model() -> Any:
    """The same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, use_cache=False))


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, SIZES["vocab_size"], (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.clone()}


def by_hand(world_size: int) -> Step:
    """Megatron's layout in DTensor's words (PyTorch's tensor-parallel tutorial), with a vocabulary-parallel loss."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    found = model()
    parallelize_module(
        found,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in found.model.layers:
        column, row = ColwiseParallel(), RowwiseParallel()
        names = {f"self_attn.{n}_proj": column for n in "qkv"} | {"mlp.gate_proj": column, "mlp.up_proj": column}
        parallelize_module(layer, mesh, {**names, "self_attn.o_proj": row, "mlp.down_proj": row})
    data = batch()

    def step() -> torch.Tensor:
        found.zero_grad()
        with loss_parallel():
            logits = found(input_ids=data["input_ids"]).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, data["labels"][:, 1:].flatten())
            loss.backward()
        return loss.detach()

    return step


def split(world_size: int, *, compiled: bool = False) -> Step:
    return by_autopar(model(), batch(), {"tp": world_size, "dp": 1, "sequence_parallel": False}, compiled=compiled)


PROGRAMS: Programs = {
    "DTensor": by_hand,
    "autopar": split,
    "autopar compiled": lambda world_size: split(world_size, compiled=True),
}


if __name__ == "__main__":
    main("tensor_parallel", "DTensor", __doc__ or "")
