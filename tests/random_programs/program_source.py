"""A drawn module as source. A failing example prints it, and a person can run it again."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import Example, randomise
from torch import nn

PREAMBLE = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"


@dataclass(frozen=True, slots=True)
class Source:
    """Python text that defines `Model`, and its inputs: name to (shape, number of ids or 0 for real values)."""

    text: str
    inputs: tuple[tuple[str, tuple[int, ...], int], ...]
    batch: int

    def __repr__(self) -> str:
        inputs = ", ".join(
            f"{name}=torch.randint({ids}, {shape})" if ids else f"{name}=torch.randn({shape})"
            for name, shape, ids in self.inputs
        )
        return f"\n{PREAMBLE}\n{self.text}\n\ninputs = dict({inputs})\n"

    def build(self) -> Example:
        """The module in float64 with random values for every parameter, and its inputs; equal in every process."""
        namespace: dict[str, Any] = {"__name__": "random_program"}
        exec(PREAMBLE + self.text, namespace)
        model: nn.Module = randomise(namespace["Model"]().double(), scale=0.4)
        generator = torch.Generator().manual_seed(1)
        inputs = {
            name: torch.randint(0, ids, shape, generator=generator)
            if ids
            else torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape, ids in self.inputs
        }
        return model, inputs


class Writer:
    """Writes the body of one module line by line; `shape` is that of the variable ``x``, the batch first.

    No line names the batch size, because a program is captured at several.
    """

    def __init__(self, rng: random.Random, shape: list[int]) -> None:
        self.rng, self.shape = rng, shape
        self.made: list[str] = []
        self.lines: list[str] = []

    def size(self, most: int = 12) -> int:
        return self.rng.choice([n for n in (2, 3, 4, 5, 6, 8, 10, 12) if n <= most])

    def choice(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def yes(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def dim(self) -> int:
        """Any dimension but the batch."""
        return self.rng.randrange(1, len(self.shape))

    def made_of(self, expression: str) -> str:
        """A new attribute of the module."""
        name = f"self.m{len(self.made)}"
        self.made.append(f"{name} = {expression}")
        return name

    def parameter(self, *shape: int) -> str:
        return self.made_of(f"nn.Parameter(torch.empty({', '.join(map(str, shape))}))")

    def linear(self, in_size: int, out_size: int) -> str:
        return self.made_of(f"nn.Linear({in_size}, {out_size}{'' if self.yes() else ', bias=False'})")

    def set(self, expression: str, shape: list[int] | None = None) -> None:
        """Assign ``x``, whose shape becomes `shape`."""
        self.lines.append(f"x = {expression}")
        if shape is not None:
            self.shape = shape

    def name(self) -> str:
        """A variable that no other line assigns."""
        return f"v{len(self.lines)}"

    @property
    def elements(self) -> int:
        """Elements of one sample."""
        return int(torch.Size(self.shape[1:]).numel())

    def text(self, name: str, arguments: str, result: str) -> str:
        made = "".join(f"        {line}\n" for line in self.made)
        body = "".join(f"        {line}\n" for line in self.lines)
        head = f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{made}"
        return f"{head}\n    def forward(self, {arguments}):\n{body}        return {result}\n"
