"""Small models with one mechanism each that many packages have, and a batch: factories ``() -> (model, inputs)``."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Factory = Callable[[], tuple[nn.Module, Batch]]
MODELS: dict[str, Factory] = {}
ROWS, LENGTH, WORDS, WIDTH, CLASSES = 8, 12, 64, 16, 5


def mechanism(factory: Factory) -> Factory:
    MODELS[factory.__name__] = factory
    return factory


def _decoder(kind: str = "Llama", **options: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False}
    what = options.pop("what", "ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **options)
    model: nn.Module = getattr(transformers, f"{kind}{what}")(config)
    return model


def _tokens() -> tuple[Tensor, Tensor]:
    """Ids, and a mask of rows of 5 to 12 tokens, padded on the right."""
    return torch.randint(1, WORDS, (ROWS, LENGTH)), (torch.arange(LENGTH) < torch.arange(5, 13)[:, None]).long()


def _with_labels(ids: Tensor, mask: Tensor) -> Batch:
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@mechanism
def padded_on_the_right() -> tuple[nn.Module, Batch]:
    return _decoder(), _with_labels(*_tokens())


@mechanism
def padded_on_the_left() -> tuple[nn.Module, Batch]:
    ids, mask = _tokens()
    return _decoder("Mistral", sliding_window=4), _with_labels(ids, mask.flip(1))


@mechanism
def packed_positions() -> tuple[nn.Module, Batch]:
    ids, _ = _tokens()
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in range(2, 2 + ROWS)])
    return _decoder(), {"input_ids": ids, "position_ids": positions, "labels": ids}


@mechanism
def last_token_of_each_row() -> tuple[nn.Module, Batch]:
    ids, mask = _tokens()
    model = _decoder("Qwen2", what="ForSequenceClassification", num_labels=3)
    return model, {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.randint(3, (ROWS,))}


class Between(nn.Module):
    """A function between two residual blocks, which a pipeline can cut, with a loss for each row."""

    def __init__(self, function: Callable[[Tensor, Mapping[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.table, self.function, self.head = nn.Embedding(WORDS, WIDTH), function, nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
        h = self.table(x)
        h = self.function(h + self.blocks[0](h), {"n": n})
        return F.cross_entropy(self.head(h + self.blocks[1](h)).mean(1), y)


def _between(function: Callable[[Tensor, Mapping[str, Tensor]], Tensor]) -> tuple[nn.Module, Batch]:
    ids, mask = _tokens()
    return Between(function), {"x": ids, "n": mask.sum(1), "y": torch.randint(CLASSES, (ROWS,))}


@mechanism
def tokens_by_row_and_number() -> tuple[nn.Module, Batch]:
    """The last two tokens of each row, by numbers that come with the batch."""

    def picked(h: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        rows = torch.arange(h.shape[0])
        return torch.stack([h[rows, given["n"] - 1], h[rows, given["n"] - h.shape[1] - 2]], 1)

    return _between(picked)


@mechanism
def best_tokens_of_each_row() -> tuple[nn.Module, Batch]:
    def picked(h: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return h[torch.arange(h.shape[0])[:, None], h.mean(-1).topk(3, dim=1).indices]

    return _between(picked)


class Gated(nn.Module):
    """A residual block whose gate and norm have another dtype than its other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(WIDTH, 4).double(), nn.LayerNorm(WIDTH).double()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x.double()).softmax(-1).amax(-1, keepdim=True).to(x.dtype)
        return x + share * self.down(F.gelu(self.up(self.norm(x.double()).to(x.dtype))))


class TwoDtypes(nn.Module):
    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        first = Gated()
        self.blocks = nn.ModuleList([first, first] if shared else [first, Gated()])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.table(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def _next_words() -> Batch:
    ids, _ = _tokens()
    return {"x": ids, "y": ids.roll(1, 1)}


@mechanism
def weights_of_two_dtypes() -> tuple[nn.Module, Batch]:
    return TwoDtypes(shared=False), _next_words()


@mechanism
def a_block_of_two_dtypes_that_runs_twice() -> tuple[nn.Module, Batch]:
    return TwoDtypes(shared=True), _next_words()


class Fourier(nn.Module):
    """A complex weight beside real weights, in one block of code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, CLASSES).double()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 4, dtype=torch.complex128) / WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.first(x).transpose(1, 2))
        kept = torch.zeros_like(waves)
        kept[..., :4] = torch.einsum("bcs,cds->bds", waves[..., :4], self.weight)
        h = torch.fft.irfft(kept, n=x.shape[1])
        return F.cross_entropy(self.head(h.mean(-1)), y)


@mechanism
def a_complex_weight() -> tuple[nn.Module, Batch]:
    return Fourier(), {"x": torch.randn(ROWS, LENGTH, WIDTH).double(), "y": torch.randint(CLASSES, (ROWS,))}


class Noisy(nn.Module):
    """An output that random numbers decide in evaluation too, and a buffer that counts steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        logits = self.head(F.gelu(self.layer(x + torch.rand_like(x))).mean(1))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


@mechanism
def noise_in_evaluation() -> tuple[nn.Module, Batch]:
    return Noisy(), {"x": torch.randn(ROWS, LENGTH, WIDTH), "y": torch.randint(CLASSES, (ROWS,))}


class Patches(nn.Module):
    """Convolutions with padding by name: patches, and odd and even kernels that keep the size."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4, padding="valid")
        self.inner = nn.Conv2d(WIDTH, WIDTH, 3, padding="same", groups=4)
        self.even, self.head = nn.Conv2d(WIDTH, WIDTH, 2, padding="same", dilation=2), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.patches(x)
        h = h + F.gelu(self.even(F.gelu(self.inner(h))))
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


@mechanism
def padding_by_name() -> tuple[nn.Module, Batch]:
    return Patches(), {"x": torch.randn(ROWS, 3, 16, 16), "y": torch.randint(CLASSES, (ROWS,))}


class Normed(nn.Module):
    """Weights that a buffer normalises, which each step of training changes."""

    def __init__(self, norm: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(nn.Linear(WIDTH, 32)), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), y)


def _normed(norm: Callable[[nn.Linear], nn.Module]) -> tuple[nn.Module, Batch]:
    return Normed(norm), {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(CLASSES, (ROWS,))}


@mechanism
def spectral_norm() -> tuple[nn.Module, Batch]:
    return _normed(nn.utils.parametrizations.spectral_norm)


@mechanism
def spectral_norm_by_a_hook() -> tuple[nn.Module, Batch]:
    return _normed(nn.utils.spectral_norm)


class Scaled(nn.Module):
    """Its scale grows by a factor with each step. The product saves the scale for the backward pass."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        out = torch.tanh(self.layer(x) * scale)
        self.scale = scale * 1.5
        return out


@mechanism
def a_scale_that_grows() -> tuple[nn.Module, Batch]:
    return _normed(Scaled)


class Named(nn.Module):
    """Parameters and buffers with names of methods and attributes of a `ParallelModel`."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.loader = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("plan", torch.randn(WIDTH))
        self.register_buffer("code", torch.zeros(()))
        self.plan: Tensor
        self.code: Tensor

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.code += 1
        hidden = self.table(ids).mean(1) * self.plan + self.loader
        return F.cross_entropy(self.head(hidden.tanh()), labels)


@mechanism
def names_of_methods() -> tuple[nn.Module, Batch]:
    return Named(), {"ids": torch.randint(WORDS, (ROWS, LENGTH)), "labels": torch.randint(CLASSES, (ROWS,))}
