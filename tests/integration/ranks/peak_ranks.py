"""Functions that ranks run in test_peak: the most bytes of tensors that live at once in a step."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar

CLASSES, WIDTH, TOKENS = 2048, 16, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Language(nn.Module):
    """A vocabulary so large that the logits are most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


class Live(TorchDispatchMode):
    """The bytes of the storages that operators have made and that live, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor):
                self._watch(value.untyped_storage())
        return found

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._seen:
            return
        size, key = storage.nbytes(), id(storage)
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def batch_of(wish: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A rank's batch: one sequence in each micro-batch."""
    shape = (wish.get("micro_batches", 1), TOKENS)
    return {"tokens": torch.randint(CLASSES, shape), "labels": torch.randint(CLASSES, shape)}


def peak(rank: int, wish: Mapping[str, Any]) -> int:
    """The most bytes that live at once in a step."""
    torch.manual_seed(0)
    batch, world = batch_of(wish), torch.distributed.get_world_size()
    parallel = autopar.parallelize(Language(), f"{world}xcpu", example_inputs=batch, plan=wish)
    parallel.forward_backward(batch)
    for parameter in parallel.parameters():
        parameter.grad = None
    with Live() as live:
        parallel.forward_backward(batch)
    return live.most
