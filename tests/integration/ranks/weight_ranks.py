"""Functions of ranks in tests of initial weights: `Ranks.run("weight_ranks:name", ...)`."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kept_captures import capturing
from packed_models import phi3
from routed_models import example
from torch import nn
from torch.nn import functional as F

from autopar.api import parallelize
from autopar.errors import AutoparError
from autopar.runtime.distributed import broadcast

ROWS, WIDTH, VOCABULARY = 8, 12, 24


class Kept(nn.Module):
    """Tied, frozen, unused, packed and scalar parameters, and buffers of each kind; random numbers are in all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mixed = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i == 0) for i in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.out[1].weight.requires_grad_(False)
        self.scale, self.unused = nn.Parameter(torch.rand(())), nn.Parameter(torch.randn(3))
        self.register_buffer("angles", torch.randn(WIDTH), persistent=False)
        self.register_buffer("kept", torch.rand(WIDTH) > 0.3)
        self.register_buffer("steps", torch.randint(9, ()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale
        for mixed, out in zip(self.mixed, self.out, strict=True):
            q, k, v = mixed(x).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
            x = x + out((q + self.angles * torch.cat([k, v], -1)).tanh()) * self.kept
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def kept() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = torch.arange(ROWS * 4).reshape(ROWS, 4)
    return Kept(), {"ids": ids % VOCABULARY, "labels": ids * 7 % VOCABULARY}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "kept": kept,
    "phi3": lambda: phi3(batch=ROWS),
    "experts": lambda: example("rows_put_back", batch=ROWS, dtype=torch.float32),
}


def model_on(name: str, seed: int | None) -> tuple[nn.Module, dict[str, Any]]:
    """A model with the weights of a seed, or on meta. The inputs are equal."""
    _, inputs = MODELS[name]()
    torch.manual_seed(seed or 0)
    with torch.device("cpu" if seed is not None else "meta"):
        model, _ = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, device="cpu") / 3)
    return model, inputs


def holding(rank: int, who: str, name: str) -> tuple[nn.Module, dict[str, Any], Any]:
    """A rank's model, the inputs and a state. The weights of rank 0 are those of seed 1."""
    if who == "rank 0's model":
        return *model_on(name, 1 if rank == 0 else None), None
    if who == "all models, unequal":
        return *model_on(name, 1 + rank), None
    whole, inputs = model_on(name, 1)
    state: Any = whole.state_dict()
    if who == "rank 0's state":  # what a state does not hold is of rank 0's model
        return whole if rank == 0 else model_on(name, None)[0], inputs, state if rank == 0 else None
    assert who == "all states, one model", who
    return whole if rank == 0 else model_on(name, 1)[0], inputs, state


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank receives."""
    found = [0]

    def received(value: torch.Tensor, source: int) -> None:
        found[0] += value.nbytes
        broadcast.receive_tensor(value, source)

    def shared(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        found[0] += value.nbytes * (dist.get_rank(group) > 0)
        broadcast.share_tensor(value, group)

    module = "autopar.runtime.parameters.initial."
    with mock.patch(module + "receive_tensor", received), mock.patch(module + "share_tensor", shared):
        yield found


def weights(rank: int, world_size: int, name: str, wish: Mapping[str, Any], who: str) -> dict[str, Any]:
    """Differences from rank 0's model after `parallelize` and in the loss of a step; bytes received and held."""
    model, inputs, state = holding(rank, who, name)
    before = {n: v.clone() for n, v in model.state_dict().items() if not v.is_meta}
    at = {n: v[: ROWS // wish.get("dp", 1)] for n, v in inputs.items()}
    with counted() as received:
        parallel = parallelize(model, f"{world_size}xcpu", example_inputs=at, plan=dict(wish), state=state)
    reference, _ = model_on(name, 1)
    expected = dict(reference.state_dict()) | dict(reference.named_buffers())
    found = parallel.state_dict()
    wrong = [
        n for n, v in found.items() if not torch.equal(v.full_tensor() if hasattr(v, "full_tensor") else v, expected[n])
    ]
    wrong += [n for n in parallel.program.buffers if not torch.equal(parallel.buffer(n), expected[n])]
    loss = float(parallel.forward_backward(parallel.local_batch(inputs)))
    own = reference(**inputs)
    own = own if isinstance(own, torch.Tensor) else own["loss"]
    return {
        "wrong": wrong,
        "names": sorted(found),
        "expected": sorted(reference.state_dict()),
        "changed": [n for n, v in before.items() if not torch.equal(v, model.state_dict()[n])],
        "loss": (loss, float(own.detach())),
        "received": received[0],
        "held": sum(getattr(p, "_local_tensor", p).nbytes for _, p in parallel.stored_parameters()),
        "whole": sum(p.nbytes for p in reference.parameters()),
        "buffers": sum(b.nbytes for b in reference.buffers()),
    }


def exports(rank: int, world_size: int, plan: Mapping[str, Any] | None, folder: str) -> list[int]:
    """How often a rank traces the model: for `parallelize`, for a batch of another length, and for eval mode."""
    model, inputs = model_on("phi3", 1)
    kept = mock.patch.dict(os.environ, {"AUTOPAR_CACHE_DIR": folder})
    with kept, capturing(), mock.patch.object(torch.export, "export", wraps=torch.export.export) as export:
        counts, cluster = [0], f"{world_size}xcpu"
        parallel = parallelize(model, cluster, example_inputs=inputs, plan=plan)
        counts.append(export.call_count)
        parallel.forward_backward({name: value[:, :-2] for name, value in inputs.items()})
        counts.append(export.call_count)
        parallel.eval().evaluate(inputs)
        counts.append(export.call_count)
    return [later - before for before, later in pairwise(counts)]


class Deciding(nn.Module):
    """Reads a buffer, so it cannot be captured on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("sign", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) if self.sign > 0 else x).square().mean()


class Scaled(nn.Module):
    """A number of the model is a constant of its program."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x.square().mean()


def refused(rank: int, world_size: int, what: str) -> str:
    """What a rank says about weights that cannot be used."""
    model, inputs = model_on("kept", 1 if rank == 0 else None)
    state: Any = None
    if what == "another dtype":
        model = model.bfloat16() if rank else model
    elif what == "another tie":
        model.head.weight = nn.Parameter(model.embedding.weight.clone()) if rank else model.head.weight  # type: ignore
    elif what == "not on rank 0":
        model, _ = model_on("kept", 1 if rank else None)
    elif what == "a state that does not fit":
        state = {"embedding.weight": torch.zeros(3)} if rank == 0 else None
    elif what == "two values of one parameter":  # is seen when the parameter is read
        state = None if rank else dict(model.state_dict()) | {"head.weight": torch.zeros(VOCABULARY, WIDTH)}
    elif what == "another number":
        model, inputs = nn.Sequential(Scaled(1.0 + rank)), {"input": torch.ones(ROWS, 4)}
    elif what == "a branch on a buffer":
        model, inputs = nn.Sequential(Deciding()).to("meta"), {"input": torch.ones(ROWS, 4)}
    try:
        parallelize(model, f"{world_size}xcpu", example_inputs=inputs, plan={"pp": 2, "tp": 2}, state=state)
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
