"""Models of integration tests: named by plain data that crosses process boundaries, captured where used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Degrees, Plan
from autopar.ir.program import Program
from autopar.models import resolve_model
from autopar.planning import capture_for, label_plan, resolve_degrees
from autopar.runtime.materialise import parameter_source
from autopar.runtime.promote import promoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A scaled-down preset: sizes, and whether it runs in float64."""

    spec: str
    layers: int = 2
    hidden: int = 64
    seq_len: int = 16
    batch: int = 4
    float64: bool = False
    vocabulary: int = 64


def built(wanted: Wanted, degrees: Degrees) -> tuple[Program, Callable[[str], torch.Tensor]]:
    """The captured program and its seeded weights."""
    return _built(wanted, replace(degrees, zero=0, sequence_parallel=None))


@lru_cache(maxsize=8)
def _built(wanted: Wanted, degrees: Degrees) -> tuple[Program, Callable[[str], torch.Tensor]]:
    found = resolve_model(
        wanted.spec,
        layers=wanted.layers,
        hidden=wanted.hidden,
        seq_len=wanted.seq_len,
        batch=wanted.batch,
        dtype="float32",
    )
    program = capture_for(found.model, found.example_inputs, degrees)
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
