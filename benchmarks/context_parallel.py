"""autopar's context parallelism against DeepSpeed-Ulysses by hand: python benchmarks/context_parallel.py

Both have the same Llama and gloo ranks, which share one sequence. By hand an attention function of transformers
exchanges tokens for heads (Jacobs et al. 2023, "DeepSpeed Ulysses"): all-to-alls of queries, keys and values before
attention, and of its results. The script cuts tokens, positions and shifted labels. One all-reduce sums all gradients,
which lie in one buffer. "autopar" splits heads too. "autopar queries" gathers keys and values.

A step is forward and backward of one sequence. Prints seconds per step, the ratio of paired rounds with its interval,
and the peak of resident memory in a step, each in its own world. Programs with other losses are refused.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from by_hand import exchange, gradient_buffer
from paired import Programs, Step, by_autopar, main

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 4096}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
SEQUENCE = 2048

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def model(attention: str = "sdpa") -> Any:
    """The same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **HEADS, max_position_embeddings=SEQUENCE, use_cache=False)
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, SIZES["vocab_size"], (1, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.clone()}


def tokens_of_heads(x: torch.Tensor) -> torch.Tensor:
    """All heads of this rank's tokens (batch, heads, tokens, width) to all tokens of this rank's heads."""
    ranks = dist.get_world_size()
    pieces = exchange(x.unflatten(1, (ranks, -1)).transpose(0, 1))
    return pieces.permute(1, 2, 0, 3, 4).flatten(2, 3)


def heads_of_tokens(x: torch.Tensor) -> torch.Tensor:
    """All tokens of this rank's heads to all heads of this rank's tokens."""
    ranks = dist.get_world_size()
    pieces = exchange(x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4))
    return pieces.transpose(0, 1).flatten(1, 2)


def ulysses(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention; arguments and result are (batch, heads, this rank's tokens, width)."""
    q, k, v = tokens_of_heads(query), tokens_of_heads(key), tokens_of_heads(value)
    return heads_of_tokens(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))


def register(name: str, attention: Attention) -> None:
    """Make an attention known to transformers. It builds no mask for such an attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def function(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        return attention(query, key, value, scaling).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register(name, function)


def sequence_by_hand(attention: str, own: torch.Tensor) -> Step:
    """Steps of a model that computes only the tokens at the places `own` of the sequence."""
    found, data = model(attention), batch()
    gradients = gradient_buffer(list(found.parameters()))
    shifted = torch.nn.functional.pad(data["labels"][:, 1:], (0, 1), value=-100)
    tokens, targets, places = data["input_ids"][:, own], shifted[:, own].flatten(), own[None]
    count = int((shifted != -100).sum())

    def step() -> torch.Tensor:
        found.zero_grad(set_to_none=False)
        logits = found(input_ids=tokens, position_ids=places).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count
        loss.backward()
        dist.all_reduce(gradients)
        total = loss.detach()
        dist.all_reduce(total)
        return total

    return step


def by_hand(world_size: int) -> Step:
    register("ulysses", ulysses)
    return sequence_by_hand("ulysses", torch.arange(SEQUENCE).chunk(world_size)[dist.get_rank()])


def split(world_size: int, context: str, *, compiled: bool = False) -> Step:
    plan = {"cp": world_size, "dp": 1, "context": context, "zero": 0}
    return by_autopar(model(), batch(), plan, compiled=compiled)


PROGRAMS: Programs = {
    "Ulysses": by_hand,
    "autopar": lambda world_size: split(world_size, "heads"),
    "autopar queries": lambda world_size: split(world_size, "queries"),
    "autopar compiled": lambda world_size: split(world_size, "heads", compiled=True),
}


if __name__ == "__main__":
    main("context_parallel", "Ulysses", __doc__ or "")
