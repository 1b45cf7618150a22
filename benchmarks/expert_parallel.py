"""autopar's expert parallelism against an exchange of rows by hand: python benchmarks/expert_parallel.py

Both have the same Mixtral and gloo ranks. Every rank has its own sequences and some of the experts. By hand a module in
place of the experts sends counts and then rows by all-to-all, as in torchtitan. It computes grouped products by the
`_grouped_mm` of transformers. One all-reduce sums the gradients of the other parameters, which lie in one buffer.
"autopar gather" gathers all tokens instead of sending rows.

A step is forward and backward of one batch. Prints seconds per step, the ratio of paired rounds with its interval, and
the peak of resident memory in a step, each in its own world. Programs with other losses are refused.
"""

from typing import Any

import torch
import torch.distributed as dist
from by_hand import exchange, gradient_buffer
from paired import Programs, Step, by_autopar, main
from torch import nn

SIZES = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 4096}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
BATCH, SEQUENCE = 2, 256  # of one rank


def model() -> Any:
    """The same weights on every rank."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, **HEADS, **EXPERTS, use_cache=False, experts_implementation="grouped_mm")
    return MixtralForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    """Sequences of this rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.randint(0, SIZES["vocab_size"], (BATCH, SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


class ExchangedExperts(nn.Module):
    """This rank's part of the experts of a block. Rows of all ranks come to it, and their products go back."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.ranks, self.count = dist.get_world_size(), whole.num_experts
        self.own = self.count // self.ranks
        part = slice(dist.get_rank() * self.own, (dist.get_rank() + 1) * self.own)
        self.gate_up_proj = nn.Parameter(whole.gate_up_proj.detach()[part].clone())
        self.down_proj = nn.Parameter(whole.down_proj.detach()[part].clone())
        self.activation = whole.act_fn

    def product(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows in the order of own experts through these experts."""
        from transformers.integrations.moe import _grouped_mm

        gate, up = _grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        out: torch.Tensor = _grouped_mm(self.activation(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        return out

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        arrived = torch.empty_like(counts)
        dist.all_to_all_single(arrived, counts)
        arrived = arrived.view(self.ranks, self.own)  # by source and own expert
        to_ranks, from_ranks = counts.view(self.ranks, self.own).sum(1).tolist(), arrived.sum(1).tolist()

        rows = exchange(tokens[order // chosen.shape[1]], to_ranks, from_ranks)
        experts = torch.arange(self.own).repeat(self.ranks).repeat_interleave(arrived.flatten())
        by_expert = experts.argsort()
        products = self.product(rows[by_expert], arrived.sum(0).cumsum(0).to(torch.int32))
        rows = exchange(products[inverse(by_expert)], from_ranks, to_ranks)

        weighted = rows[inverse(order)].view(*chosen.shape, -1) * weights[..., None]
        return weighted.sum(1).to(tokens.dtype)


def inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def by_hand(world_size: int) -> Step:
    """Expert gradients are sums over all tokens already, because the rows of all ranks came to them."""
    found, data = model(), batch()
    for layer in found.model.layers:
        layer.mlp.experts = ExchangedExperts(layer.mlp.experts)
    experts = [weight for layer in found.model.layers for weight in layer.mlp.experts.parameters()]
    known = {id(weight) for weight in experts}
    common = gradient_buffer([weight for weight in found.parameters() if id(weight) not in known])
    gradient_buffer(experts)
    targets = data["labels"][:, 1:].flatten()
    count = world_size * len(targets)

    def step() -> torch.Tensor:
        found.zero_grad(set_to_none=False)
        logits = found(input_ids=data["input_ids"]).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count
        loss.backward()
        dist.all_reduce(common)
        total = loss.detach()
        dist.all_reduce(total)
        return total

    return step


def split(world_size: int, dispatch: str, *, compiled: bool = False) -> Step:
    plan = {"dp": world_size, "ep": world_size, "dispatch": dispatch, "zero": 0}
    return by_autopar(model(), batch(), plan, compiled=compiled)


PROGRAMS: Programs = {
    "by hand": by_hand,
    "autopar": lambda world_size: split(world_size, "exchange"),
    "autopar gather": lambda world_size: split(world_size, "gather"),
    "autopar compiled": lambda world_size: split(world_size, "exchange", compiled=True),
}


if __name__ == "__main__":
    main("expert_parallel", "by hand", __doc__ or "")
