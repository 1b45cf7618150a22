"""A value that several later blocks use is converted once, and its gradient is summed over all of them."""

from collections import Counter

import torch
from equivalence import case_of, check, labelled
from tiny_models import randomise
from torch import nn
from torch.nn import functional as F

from autopar.ir.sharding import Mesh
from autopar.ir.storage import boundary_types

WIDTH, HEADS, LENGTH, MEMORY = 16, 4, 6, 10


class Decoder(nn.Module):
    """A layer that attends over an encoder's output, with a mask and a rotation that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)

        query = heads(self.query(self.norm(x))) * turn
        scores = query @ heads(self.key(memory)).transpose(-1, -2) + mask
        return x + self.out((scores.softmax(-1) @ heads(self.value(memory))).transpose(1, 2).flatten(2))


class EncoderDecoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH))
        self.angles = nn.Parameter(torch.empty(LENGTH, WIDTH // HEADS))
        self.layers = nn.ModuleList(Decoder() for _ in range(layers))

    def forward(self, source: torch.Tensor, x: torch.Tensor, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(source)
        mask = torch.zeros_like(hidden).masked_fill(hidden > 1, -1e4)[:, None, None, :]
        turn = self.angles.cos()
        for layer in self.layers:
            x = layer(x, memory, mask, turn)
        return F.mse_loss(x, y)


def example(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"source": (4, MEMORY, WIDTH), "x": (4, LENGTH, WIDTH), "y": (4, LENGTH, WIDTH), "hidden": (4, MEMORY)}
    inputs = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()}
    return randomise(EncoderDecoder(layers).double()), inputs


def test_what_all_decoder_layers_use_is_whole_before_the_first() -> None:
    """Encoder output, mask and rotation cross into every layer as they are used there: no layer gathers them again."""
    case = case_of(example(3))
    mesh = Mesh(("tp",), (2,))
    labels = labelled(case, mesh, sequence_parallel=True)
    types = boundary_types(case.program, labels)
    uses = Counter(a for call in case.program.calls for a in call.arguments if isinstance(a, str))
    made = {r for call in case.program.calls for r in call.results}
    shared = {name for name, count in uses.items() if count == 3 and name in made}
    assert len(shared) >= 2, uses
    assert all(types[name][0].kind in "RI" for name in shared), {name: types[name] for name in shared}
    check(case, labels, mesh)
