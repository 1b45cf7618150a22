"""autopar's ZeRO-3 against torch's `fully_shard` by hand: python benchmarks/zero.py

Both have the same Llama, gloo ranks, and two micro-batches a step. By hand it has FSDP2 over every layer, as in torch's
tutorial. A step is forward and backward. Prints seconds per step, the ratio of paired rounds with its interval, and the
peak of resident memory in a step, each in its own world.
"""

from typing import Any

import torch
from paired import Programs, Step, by_autopar, main
from tensor_parallel import batch, model
from torch.distributed.device_mesh import init_device_mesh

MICRO_BATCHES = 2


def data() -> list[dict[str, torch.Tensor]]:
    """Micro-batches of one rank."""
    return [batch() for _ in range(MICRO_BATCHES)]


def by_hand(world_size: int) -> Step:
    """`fully_shard` on every layer and the root; gradients summed every micro-batch and divided by all targets."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    found: Any = model()
    for part in (*found.model.layers, found):
        fully_shard(part, mesh=mesh)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no average
    pieces = data()
    count = world_size * sum(int((piece["labels"][:, 1:] != -100).sum()) for piece in pieces)

    def step() -> torch.Tensor:
        found.zero_grad()
        total = torch.zeros(())
        for piece in pieces:
            logits = found(input_ids=piece["input_ids"]).logits[:, :-1].flatten(0, 1)
            targets = piece["labels"][:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count
            loss.backward()
            total += loss.detach()
        return total * world_size

    return step


def sharded(world_size: int, *, compiled: bool = False) -> Step:
    pieces = data()
    whole = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    plan = {"dp": world_size, "zero": 3, "accumulate": MICRO_BATCHES}
    return by_autopar(model(), whole, plan, compiled=compiled)


PROGRAMS: Programs = {
    "FSDP2": by_hand,
    "autopar": sharded,
    "autopar compiled": lambda world_size: sharded(world_size, compiled=True),
}

if __name__ == "__main__":
    main("zero", "FSDP2", __doc__ or "")
