"""Families that no transformers config describes: plain torch layers, mixers and convolutional networks."""

import torch
from torch import nn
from torch.nn import functional

Example = tuple[nn.Module, dict[str, torch.Tensor]]
WIDTH, HEADS, FFN, TOKENS, VOCABULARY, CLASSES = 32, 4, 64, 8, 64, 8


def _floats(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _ids(*shape: int, end: int, seed: int) -> torch.Tensor:
    return torch.randint(0, end, shape, generator=torch.Generator().manual_seed(seed))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` between a token table and a head over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.table(input_ids)))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Decoder(nn.Module):
    """`nn.TransformerDecoder` under a causal mask, over encoder states that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, FFN, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(
            input_ids.shape[1], device=memory.device, dtype=memory.dtype
        )
        logits = self.head(self.layers(self.table(input_ids), memory, tgt_mask=mask, tgt_is_causal=True))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class MixerLayer(nn.Module):
    """Tolstikhin et al. 2021: one MLP over tokens, one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(TOKENS, FFN), nn.GELU(), nn.Linear(FFN, TOKENS))
        self.channels = nn.Sequential(nn.Linear(WIDTH, FFN), nn.GELU(), nn.Linear(FFN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_2(x))


class Mixer(nn.Module):
    """Patches of a sequence of vectors, two mixer layers, the mean over tokens and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(MixerLayer(), MixerLayer())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": functional.cross_entropy(self.head(self.layers(self.stem(x)).mean(1)), labels)}


class Mlp(nn.Module):
    """Two layers with a norm, a residual and a mean square loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, FFN), nn.Tanh(), nn.Linear(FFN, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": functional.mse_loss(x, target)}


class ResidualBlock(nn.Module):
    """He et al. 2016: two convolutions with batch norm around a shortcut, which halves the image on request."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = shortcut if stride > 1 or width != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_2(self.conv_2(torch.relu(self.norm_1(self.conv_1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A stem with max pooling, two stages of two blocks, global average pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        blocks = [ResidualBlock(8, 8, 1), ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), ResidualBlock(16, 16, 1)]
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = functional.adaptive_avg_pool2d(self.stages(self.stem(pixel_values)), 1).flatten(1)
        return {"loss": functional.cross_entropy(self.head(x), labels)}


class ConvNextBlock(nn.Module):
    """Liu et al. 2022: a depthwise convolution, then an MLP over channels with a scale per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(functional.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Patches, two blocks, a downsampling convolution, two blocks, the mean over places and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.first = nn.Sequential(ConvNextBlock(8), ConvNextBlock(8))
        self.down = nn.Conv2d(8, 16, 2, 2)
        self.second = nn.Sequential(ConvNextBlock(16), ConvNextBlock(16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.second(self.down(self.first(self.stem(pixel_values))))
        return {"loss": functional.cross_entropy(self.head(self.norm(x.mean((2, 3)))), labels)}


def _tokens(batch: int) -> dict[str, torch.Tensor]:
    ids, labels = (_ids(batch, TOKENS, end=VOCABULARY, seed=seed) for seed in (1, 2))
    labels[0, 1:3] = -100
    return {"input_ids": ids, "labels": labels}


def _images(batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": _floats(batch, 3, 8, 8, seed=1), "labels": _ids(batch, end=CLASSES, seed=2)}


def encoder(batch: int) -> Example:
    return Encoder(), _tokens(batch)


def decoder(batch: int) -> Example:
    return Decoder(), _tokens(batch) | {"memory": _floats(batch, TOKENS, WIDTH, seed=3)}


def mixer(batch: int) -> Example:
    return Mixer(), {"x": _floats(batch, TOKENS, WIDTH, seed=1), "labels": _ids(batch, end=CLASSES, seed=2)}


def mlp(batch: int) -> Example:
    return Mlp(), {"x": _floats(batch, WIDTH, seed=1), "target": _floats(batch, WIDTH, seed=2)}


def resnet(batch: int) -> Example:
    return ResNet(), _images(batch)


def convnext(batch: int) -> Example:
    return ConvNext(), _images(batch)
