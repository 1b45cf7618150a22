"""autopar's ring attention against torch's experimental one: python benchmarks/ring_attention.py

Both have the same Llama and gloo ranks, which share one sequence. The script by hand cuts tokens, positions and shifted
labels with torch's head-and-tail load balancer, so that all ranks have the same work. One all-reduce sums all
gradients, which lie in one buffer. "torch ring" sends keys and values from rank to rank (`set_rotate_method`).
"torch gather" gathers them, torch's default.

`context_parallel` of torch 2.13 refuses CPU tensors: CPU's flash attention has no sharding strategy. So the script
calls the loop below it (`_templated_ring_attention` and its backward) with CPU's flash attention. No DTensor is made,
which saves torch time.

A step is forward and backward of one sequence. Prints seconds per step, the ratio of paired rounds with its interval,
and the peak of resident memory in a step, each in its own world. Programs with other losses are refused.
"""

from typing import Any

import torch
import torch.distributed as dist
from context_parallel import SEQUENCE, register, sequence_by_hand, split
from paired import Programs, Step, main
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
TOKENS = 2  # the dimension of tokens in queries and keys


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class _Ring(torch.autograd.Function):
    """Causal attention of ranks that hold an early and a late part of the sequence each."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, rotation: str
    ) -> torch.Tensor:
        set_rotate_method(rotation)
        out, sums = ring._templated_ring_attention(
            world(), TOKENS, FLASH, query, key, value, is_causal=True, dropout_p=0.0, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.options = scale, rotation
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale, rotation = ctx.options
        set_rotate_method(rotation)
        query, key, value, out, sums = ctx.saved_tensors
        found = ring._templated_ring_attention_backward(
            world(),
            TOKENS,
            FLASH_BACKWARD,
            grads[0],
            "grad_out",
            query,
            key,
            value,
            out,
            sums,
            is_causal=True,
            dropout_p=0.0,
            scale=scale,
        )
        return *found, None, None


def by_hand(world_size: int, rotation: str) -> Step:
    """`rotation` is "alltoall" or "allgather"."""
    register(rotation, lambda query, key, value, scale: _Ring.apply(query, key, value, scale, rotation))
    order = _HeadTailLoadBalancer(SEQUENCE, world_size, "cpu")._generate_indices()[0].long()
    return sequence_by_hand(rotation, order.chunk(world_size)[dist.get_rank()])


PROGRAMS: Programs = {
    "torch ring": lambda world_size: by_hand(world_size, "alltoall"),
    "torch gather": lambda world_size: by_hand(world_size, "allgather"),
    "autopar": lambda world_size: split(world_size, "ring"),
    "autopar compiled": lambda world_size: split(world_size, "ring", compiled=True),
}


if __name__ == "__main__":
    main("ring_attention", "torch ring", __doc__ or "")
