"""Small models around one operator each, with random inputs and targets: factories ``() -> (model, inputs)``."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BATCH, TOKENS, WIDTH, HEADS = 4, 16, 32, 4
Between = Callable[["Around", torch.Tensor], torch.Tensor]
BETWEEN: dict[str, Between] = {}


def between(function: Between) -> Between:
    BETWEEN[function.__name__] = function
    return function


class Around(nn.Module):
    """A function between two linear layers, with a loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.ids: torch.Tensor | None = None
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.slopes = nn.Parameter(torch.randn(HEADS))
        self.upwards = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.table = nn.Embedding(20, WIDTH)
        angles = torch.outer(torch.arange(float(TOKENS)), torch.arange(1.0, 5.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x)
        self.ids = ids
        out = self.last(BETWEEN[self.name](self, hidden))
        self.ids = None  # a capture must leave no tensor behind
        return {"loss": F.cross_entropy(out.flatten(0, -2), target.flatten()), "out": out}


def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    inputs = {
        "x": torch.randn(BATCH, TOKENS, WIDTH),
        "ids": torch.randint(0, 20, (BATCH, TOKENS)),
        "target": torch.randint(0, 3, (BATCH, TOKENS)),
    }
    return Around(name), inputs


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def image(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (4, 4)).unflatten(-1, (4, 8)).flatten(2, 3)


def tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).unflatten(1, (TOKENS, -1))[..., :WIDTH]


@between
def complex_rotation(model: Around, x: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (HEADS, 4, 2)))
    q = torch.view_as_real(pairs * model.turns[:, None]).flatten(3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, heads(x), is_causal=True).transpose(1, 2).flatten(2)


@between
def score_function(model: Around, x: torch.Tensor) -> torch.Tensor:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, device=x.device, BLOCK_SIZE=8)
    q = heads(x)
    bias: Callable[..., torch.Tensor] = lambda s, b, h, i, j: s + (i - j) * model.slopes[h]  # noqa: E731
    return flex_attention(q, q, q, score_mod=bias, block_mask=mask).transpose(1, 2).flatten(2)


@between
def compiled_grouped_scores(model: Around, x: torch.Tensor) -> torch.Tensor:
    q = heads(x)
    k = q[:, :2]
    return torch.compile(flex_attention)(q, k, k, enable_gqa=True, scale=0.3).transpose(1, 2).flatten(2)


@between
def broadcast_mask(model: Around, x: torch.Tensor) -> torch.Tensor:
    q = heads(x)
    mask = x[:, None, None, :, 0] + model.slopes[:, None, None]
    k = q[:, :2]
    return (
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask, scale=0.2, enable_gqa=True).transpose(1, 2).flatten(2)
    )


@between
def fourier(model: Around, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=TOKENS, dim=1) + torch.fft.fft2(x).real


@between
def vmapped(model: Around, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda one: model.last.weight.sum() * one + one.sum(0))(x)


@between
def scanned(model: Around, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops import scan

    state, steps = scan(lambda state, at: (state * 0.5 + at, state * at), torch.zeros_like(x[:, 0]), x, dim=1)
    return steps.reshape_as(x) + state[:, None]


@between
def branches(model: Around, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a.sin(), (x,))
    return out


@between
def resized(model: Around, x: torch.Tensor) -> torch.Tensor:
    return tokens(F.interpolate(image(x), scale_factor=2, mode="bilinear"))


@between
def transposed_convolution(model: Around, x: torch.Tensor) -> torch.Tensor:
    return tokens(model.upwards(image(x)))


@between
def bags(model: Around, x: torch.Tensor) -> torch.Tensor:
    return x + F.embedding_bag(model.ids, model.table.weight, mode="mean")[:, None]


@between
def bags_with_offsets(model: Around, x: torch.Tensor) -> torch.Tensor:
    offsets = torch.arange(BATCH, device=x.device) * 5
    found = F.embedding_bag(model.ids.flatten(), model.table.weight, offsets, mode="sum")
    return x * found.mean(0)


@between
def sampled(model: Around, x: torch.Tensor) -> torch.Tensor:
    turned = torch.eye(2, 3, dtype=x.dtype, device=x.device).expand(x.shape[0], 2, 3) * 0.7
    return tokens(F.grid_sample(image(x), F.affine_grid(turned, list(image(x).shape), align_corners=False)))


@between
def patches(model: Around, x: torch.Tensor) -> torch.Tensor:
    return tokens(F.fold(F.unfold(image(x), 2, stride=2).sin(), (16, 8), 2, stride=2))


@between
def unpooled(model: Around, x: torch.Tensor) -> torch.Tensor:
    return tokens(F.max_unpool2d(*F.max_pool2d(image(x), 2, return_indices=True), 2))


@between
def instance_norm(model: Around, x: torch.Tensor) -> torch.Tensor:
    return tokens(F.instance_norm(image(x), weight=model.slopes, bias=model.slopes))


def complex_rotation_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return made("complex_rotation")


def fourier_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return made("fourier")


def bags_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return made("bags")


def transposed_convolution_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return made("transposed_convolution")
