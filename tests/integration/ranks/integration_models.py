"""Models of integration tests: named by plain data that crosses process boundaries, captured where used."""

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from autopar.capture.request import Request
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.trained import trained_from
from autopar.models.adapters import with_trained
from autopar.models.load import resolve_model
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import capture_for, label_plan
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.verify.float64_program import promoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A scaled-down preset, or a model taken as it is, and whether it runs in float64."""

    spec: str
    layers: int = 2
    hidden: int = 64
    seq_len: int = 16
    batch: int = 4
    float64: bool = False
    as_it_is: bool = False


def built(wanted: Wanted, degrees: Degrees) -> tuple[Program, Callable[[str], torch.Tensor]]:
    """The captured program and its seeded weights."""
    return _built(wanted, replace(degrees, zero=0, sequence_parallel=None))


@lru_cache(maxsize=8)
def _built(wanted: Wanted, degrees: Degrees) -> tuple[Program, Callable[[str], torch.Tensor]]:
    sizes = {} if wanted.as_it_is else {"layers": wanted.layers, "hidden": wanted.hidden, "seq_len": wanted.seq_len}
    batch = None if wanted.as_it_is else wanted.batch
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = resolve_model(wanted.spec, batch=batch, dtype="float32", **sizes)
    program = capture_for(Request.of(found.model, found.example_inputs), degrees)
    source = parameter_source(found.model)
    return (promoted(program) if wanted.float64 else program), source


def planned(wanted: Wanted, world_size: int, wish: Mapping[str, Any]) -> tuple[Program, Plan]:
    """The program and the labeller's plan."""
    degrees = resolve_degrees(wish, world_size, wanted.batch)
    program, _ = built(wanted, degrees)
    return program, label_plan(program, ClusterSpec.preset(f"{world_size}xcpu"), degrees, wanted.spec)


class Branches(torch.nn.Module):
    """Looks at its data to decide what to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = -x
        return self.layer(x).mean()


def branches() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return torch.nn.Sequential(Branches()), {"input": torch.zeros(4, 4)}


class Odd(torch.nn.Module):
    """Frozen, unused, scalar and bias-less parameters, dropout, widths that few degrees divide, a plain mean loss."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.norm = torch.nn.LayerNorm(2 * width)
        self.down = torch.nn.Linear(2 * width, width)
        self.frozen = torch.nn.Linear(width, width).requires_grad_(False)
        self.unused = torch.nn.Linear(3, 3)
        self.scale, self.offset = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.zeros(()))
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))
        return (self.frozen(y) * self.scale + self.offset).square().mean()


def odd() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Odd(), (torch.zeros(12, 12),)


def odd_width() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Odd(7), (torch.zeros(12, 7),)


class Sum(torch.nn.Module):
    """A summed loss and a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.one(x).relu()
        return {"loss": (self.two(hidden) - y).square().sum(), "hidden": hidden}


def summed() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Sum(), {"x": torch.zeros(12, 12), "y": torch.zeros(12, 12)}


class Contrastive(torch.nn.Module):
    """Every sample is compared with all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(12, 24), torch.nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.leave(self.enter(x).relu())
        return torch.nn.functional.cross_entropy(z @ z.t(), torch.arange(x.shape[0], device=x.device))


def contrastive() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Contrastive(), {"x": torch.zeros(12, 12)}


class Latents(torch.nn.Module):
    """Layers over learned vectors. The value before the first layer is a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = torch.nn.Parameter(torch.randn(6, 12))
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(12), torch.nn.Linear(12, 12)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.latents.expand(x.shape[0], 6, 12)
        for layer in self.layers:
            y = y + torch.tanh(layer(y)) * x.unsqueeze(1)
        return y.square().mean()


def latents() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Latents(), (torch.zeros(4, 12),)


def drawn_elsewhere() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Weights of Python's and NumPy's generators."""
    model = Latents()
    with torch.no_grad():
        model.latents[0, random.randrange(12)] += 1 + random.random()
        model.latents[1, 0] += np.random.rand()
    return model, (torch.zeros(4, 12),)


class Redrawn(torch.nn.Module):
    """Draws a buffer anew in every forward pass, which every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(3))
        self.register_buffer("projection", torch.eye(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.projection.copy_(torch.linalg.qr(torch.randn(12, 12))[0])
        for layer in self.layers:
            x = x + torch.softmax(layer(x) @ self.projection, -1)
        return x.square().mean()


def redrawn() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Redrawn(), (torch.zeros(4, 12),)


class Residual(torch.nn.Module):
    """A convolutional network with batch norm and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.inner = torch.nn.Sequential(
            torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3, padding=1, bias=False)
        )
        self.norm, self.head = torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(x)
        scores = self.head(self.norm(x + self.inner(x)).relu().mean((2, 3)))
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "scores": scores}


def residual() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Residual(), {"x": torch.zeros(12, 2, 6, 6), "labels": torch.zeros(12, dtype=torch.long)}


class Experts(torch.nn.Module):
    """Two of three experts for every sample; the loss adds how unevenly a batch uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(12, 3)
        self.up, self.down = (torch.nn.Parameter(torch.randn(3, *shape) / 4) for shape in ((12, 8), (8, 12)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        chosen = torch.zeros_like(weights).scatter(-1, weights.topk(2).indices, 1.0)
        hidden = torch.einsum("bd,edh->ebh", x, self.up).relu()
        out = torch.einsum("ebh,ehd,be->bd", hidden, self.down, weights * chosen)
        balance = 3 * (chosen.mean(0) * weights.mean(0)).sum()
        return (out - y).square().mean() + 0.1 * balance


def experts() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Experts(), {"x": torch.zeros(12, 12), "y": torch.zeros(12, 12)}


class Noisy(torch.nn.Module):
    """Adds noise that is not dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(12, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (y + torch.randn_like(y)).square().mean()


class DrawingLayer(torch.nn.Module):
    """Dropout, stochastic depth and noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.dropout(torch.tanh(self.up(x)), 0.2, self.training)
        keep = x.new_empty((x.shape[0], 1)).bernoulli_(0.8) / 0.8
        return x + keep * self.down(inner + 0.1 * torch.randn_like(inner))


class Drawing(torch.nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(DrawingLayer(width) for _ in range(4))
        self.head = torch.nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out.square().mean()


def drawing() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Drawing(), {"x": torch.zeros(4, 12)}


def noisy() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Noisy(), {"x": torch.zeros(4, 12)}


def _llama(heads: int, groups: int, hidden: int, width: int, vocabulary: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=4,
        vocab_size=vocabulary,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (4, 16), generator=generator)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens.clone()}


def padded() -> Any:
    """Seven key heads, 30 columns and 57 rows: none divisible by 4."""
    return _llama(14, 7, 28, 30, 57)


def padded_by_two() -> Any:
    """Five key heads, 31 columns and 57 rows: none divisible by 2."""
    return _llama(10, 5, 40, 31, 57)


def grouped() -> Any:
    """Two key heads with four queries each."""
    return _llama(8, 2, 32, 32, 64)


def adapters() -> Any:
    """Low-rank adapters beside all linear layers of a frozen model."""
    model, inputs = _llama(8, 2, 32, 32, 64)
    return with_trained(model, trained_from("lora:r=4,also=embed_tokens")), inputs


def frozen() -> Any:
    """A model whose embedding and head are frozen."""
    model, inputs = _llama(8, 2, 32, 32, 64)
    return with_trained(model, trained_from("frozen:embed_tokens+lm_head")), inputs


class Recorded(torch.nn.Module):
    """Batch norm, a counter, an assigned running mean, two tables, one of which is saved; returns scores, no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv1d(4, 8, 3, padding=1, bias=False), torch.nn.BatchNorm1d(8), torch.nn.ReLU()
        )
        self.head = torch.nn.Linear(8, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.linspace(1, 2, 8))
        self.register_buffer("offset", torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        features = self.layers(x).mean(-1)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * features.detach().mean(0)
        scores: torch.Tensor = self.head(features * self.scale + self.offset)
        return scores


class RecordedWithLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Recorded()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.model(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "scores": scores}


def recorded() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return RecordedWithLoss(), {"x": torch.zeros(4, 4, 8), "labels": torch.zeros(4, dtype=torch.long)}


def recorded_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step, of 8 samples."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 6, (8,), generator=generator)


def seeded_recorded() -> Recorded:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Recorded().double()


def materialised(model: torch.nn.Module, source: Callable[[str], torch.Tensor]) -> torch.nn.Module:
    """A CPU copy of a meta model that holds the weights and buffers of `source`; tied parameters stay tied."""
    plain = copy.deepcopy(model)
    made: dict[int, torch.nn.Parameter] = {}
    for path, module in plain.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                value = source(prefix + name).detach().clone()
                made[id(parameter)] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, _ in module.named_buffers(recurse=False):
            module._buffers[name] = source(prefix + name).clone()
    return plain.train()
