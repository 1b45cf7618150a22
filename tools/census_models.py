"""The models of the census: as their packages build them, from configurations, without weights.

Every package is a function that gives entries. An entry builds a model and inputs for one training step. It is called
under `torch.device("meta")`, so no model takes memory. A package that is not installed has no entries.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH = 4
CLASSES = 10
IMAGE, TOKENS = 64, 32
Built = tuple[nn.Module, Any, Callable[..., torch.Tensor] | None]  # model, inputs, loss_fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model of the census."""

    package: str
    name: str
    build: Callable[[], Built]


class Part(nn.Module):
    """A model with one of its outputs: an attribute, a key or a position."""

    def __init__(self, model: nn.Module, output: str | int) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        found = self.model(*args)
        out: torch.Tensor = getattr(found, self.output) if isinstance(self.output, str) else found[self.output]
        return out


def squared(out: Any, target: torch.Tensor) -> torch.Tensor:
    """The mean square of the first output tensor, whatever shape it has. `target` only gives the batch."""
    while not isinstance(out, torch.Tensor):
        out = next(iter(out.values())) if isinstance(out, Mapping) else out[0]
    return out.float().square().mean() + 0 * target.float().mean()


def image(channels: int = 3, size: int = IMAGE, dims: int = 2) -> torch.Tensor:
    """A batch of images or volumes."""
    return torch.randn(BATCH, channels, *[size] * dims)


def classes() -> torch.Tensor:
    """A batch of class numbers."""
    return torch.randint(0, CLASSES, (BATCH,))


def classifier(model: nn.Module, x: torch.Tensor) -> Built:
    """A model whose output are the logits of classes."""
    return model, (x, classes()), F.cross_entropy


def with_square(model: nn.Module, *inputs: torch.Tensor) -> Built:
    """A model with a loss of its first output."""
    return model, (*inputs, torch.zeros(BATCH)), squared


# ---- timm: the first and the smallest model of every file ----


def timm_entries() -> Iterator[Entry]:
    """The first and the smallest model of every file of timm."""
    import timm

    for module in sorted(timm.list_modules()):
        names = timm.list_models(module=module)
        short = min(names, key=lambda n: (not any(w in n for w in ("tiny", "nano", "atto", "small", "xxs")), len(n), n))
        for name in dict.fromkeys((names[0], short)):
            yield Entry(package="timm", name=name, build=partial(_timm, name))


def _timm(name: str) -> Built:
    import timm

    model = timm.create_model(name, num_classes=CLASSES)
    channels, height, width = model.default_cfg.get("input_size", (3, 224, 224))
    return classifier(model, torch.randn(BATCH, channels, height, width))


# ---- torchvision ----


def torchvision_entries() -> Iterator[Entry]:
    """The first and the last model of every file of torchvision."""
    from torchvision import models

    by_file: dict[str, list[str]] = {}
    for name in models.list_models(include=None, exclude=["quantized*"]):
        by_file.setdefault(models.get_model_builder(name).__module__, []).append(name)
    for names in by_file.values():
        for name in dict.fromkeys((names[0], names[-1])):
            yield Entry(package="torchvision", name=name, build=partial(_torchvision, name))


def _torchvision(name: str) -> Built:
    from torchvision import models

    module = models.get_model_builder(name).__module__
    if "detection" in module:
        model = models.get_model(name, weights=None, weights_backbone=None)
        boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0]])
        targets = [{"boxes": boxes, "labels": torch.ones(1, dtype=torch.int64)} for _ in range(BATCH)]
        return model, ([image()[0] for _ in range(BATCH)], targets), None
    if "optical_flow" in module:
        return with_square(Part(models.get_model(name), -1), image(size=128), image(size=128))
    if "video" in module:
        return classifier(models.get_model(name, num_classes=CLASSES), torch.randn(BATCH, 3, 16, 112, 112))
    if "segmentation" in module:
        return with_square(models.get_model(name, weights_backbone=None, num_classes=CLASSES), image(size=128))
    size = 299 if "inception" in name else 224
    more = {"aux_logits": False} if "inception" in name or "googlenet" in name else {}
    return classifier(models.get_model(name, num_classes=CLASSES, **more), image(size=size))


# ---- transformers: every model type with a language head, an image or audio head, and two layers ----

_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
)
_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)


def transformers_entries() -> Iterator[Entry]:
    """Every model type with one of the heads above."""
    from transformers.models.auto import modeling_auto

    seen = set()
    for head in _HEADS:
        for kind, names in getattr(modeling_auto, head).items():
            name = names if isinstance(names, str) else names[0]
            if kind not in seen:
                seen.add(kind)
                yield Entry(package="transformers", name=name, build=partial(_transformers, kind, name))


def _transformers(kind: str, name: str) -> Built:
    import transformers

    from autopar.models.example_inputs import example_inputs_for

    config = transformers.CONFIG_MAPPING[kind]()
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for layers in _LAYERS:
            if part is not None and isinstance(getattr(part, layers, None), int):
                setattr(part, layers, min(2, getattr(part, layers)))
    if isinstance(vars(config).get("layer_types"), list):
        config.layer_types = config.layer_types[:2]
    config.use_cache = False
    model = getattr(transformers, name)(config)
    if (
        model.main_input_name in ("input_values", "input_features")
        and "labels" in inspect.signature(model.forward).parameters
    ):
        shape = (
            (BATCH, 16_000)
            if model.main_input_name == "input_values"
            else (BATCH, getattr(config, "num_mel_bins", 80), 3000)
        )
        labels = torch.randint(1, 20, (BATCH, 8))
        return model, {model.main_input_name: torch.randn(shape), "labels": labels}, None
    if name.endswith("ForImageClassification") and not hasattr(config, "image_size"):
        pixels = torch.randn(BATCH, getattr(config, "num_channels", 3), 224, 224)
        return model, {"pixel_values": pixels, "labels": torch.zeros(BATCH, dtype=torch.int64)}, None
    return model, example_inputs_for(model, BATCH, TOKENS), None


# ---- diffusers ----


def diffusers_entries() -> Iterator[Entry]:
    """Denoisers and autoencoders."""
    for name, build in _DIFFUSERS.items():
        yield Entry(package="diffusers", name=name, build=build)


def _diffusers(
    name: str, inputs: Callable[[], tuple[torch.Tensor, ...]], output: str | int = "sample", **config: Any
) -> Built:
    import diffusers

    return with_square(Part(getattr(diffusers, name)(**config), output), *inputs())


def _noisy(channels: int, size: int, *more: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return image(channels, size), torch.randint(0, 1000, (BATCH,)), *(torch.randn(BATCH, *shape) for shape in more)


_SMALL: Mapping[str, Any] = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_ENCODER: Mapping[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_HEADED: Mapping[str, Any] = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16}
_DIFFUSERS: Mapping[str, Callable[[], Built]] = {
    "UNet2DModel": partial(
        _diffusers,
        "UNet2DModel",
        partial(_noisy, 3, 32),
        sample_size=32,
        **_SMALL,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "UNet2DConditionModel": partial(
        _diffusers,
        "UNet2DConditionModel",
        partial(_noisy, 4, 32, (7, 48)),
        sample_size=32,
        cross_attention_dim=48,
        **_SMALL,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "UNet1DModel": partial(
        _diffusers,
        "UNet1DModel",
        lambda: (torch.randn(BATCH, 2, 64), torch.randint(0, 1000, (BATCH,))),
        block_out_channels=(16, 32),
        extra_in_channels=16,
        down_block_types=("DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D"),
    ),
    "AutoencoderKL": partial(_diffusers, "AutoencoderKL", lambda: (image(3, 32),), **_SMALL, **_ENCODER),
    "VQModel": partial(_diffusers, "VQModel", lambda: (image(3, 32),), **_SMALL, **_ENCODER),
    "AutoencoderTiny": partial(_diffusers, "AutoencoderTiny", lambda: (image(3, 32),)),
    "DiTTransformer2DModel": partial(
        _diffusers,
        "Transformer2DModel",
        lambda: (image(4, 32),),
        in_channels=4,
        **_HEADED,
        cross_attention_dim=None,
        norm_num_groups=4,
    ),
    "PriorTransformer": partial(
        _diffusers,
        "PriorTransformer",
        lambda: (
            torch.randn(BATCH, 64),
            torch.randint(0, 1000, (BATCH,)),
            torch.randn(BATCH, 64),
            torch.randn(BATCH, 77, 64),
        ),
        "predicted_image_embedding",
        **_HEADED,
        embedding_dim=64,
    ),
    "T5FilmDecoder": partial(
        _diffusers,
        "UVit2DModel",
        lambda: (
            torch.randint(0, 100, (BATCH, 16, 16)),
            torch.randn(BATCH, 7, 64),
            torch.randn(BATCH, 32),
            torch.randn(BATCH, 5),
        ),
        0,
        hidden_size=64,
        cond_embed_dim=32,
        encoder_hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        in_channels=32,
        block_out_channels=32,
        block_num_heads=4,
        vocab_size=128,
        codebook_size=100,
        sample_size=16,
    ),
}


# ---- vit_pytorch: every file whose main class takes the usual arguments ----

_VIT = {
    "image_size": IMAGE, "patch_size": 16, "num_classes": CLASSES, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128,
    "dim_head": 16, "channels": 3, "cls_depth": 1, "frames": 4, "image_patch_size": 16, "frame_patch_size": 2,
    "spatial_depth": 1, "temporal_depth": 1, "seq_len": 64, "num_register_tokens": 2, "block_repeats": (1, 1),
    "num_hierarchies": 2, "max_patches": 16,
}  # fmt: skip


def vit_pytorch_entries() -> Iterator[Entry]:
    """The classes of vit_pytorch that take the usual arguments and classify images."""
    import vit_pytorch

    for info in pkgutil.iter_modules(vit_pytorch.__path__):
        yield Entry(package="vit_pytorch", name=info.name, build=partial(_vit_pytorch, info.name))


def _vit_pytorch(file: str) -> Built:
    module = importlib.import_module(f"vit_pytorch.{file}")
    found = [
        kind for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__
        and "num_classes" in inspect.signature(kind).parameters
    ]  # fmt: skip
    if not found:
        raise NotImplementedError("no class takes num_classes")
    known = inspect.signature(found[-1]).parameters
    needed = {
        n for n, p in known.items() if (p.default is p.empty and p.kind is p.KEYWORD_ONLY) or n in ("dim", "depth")
    }
    if missing := needed - set(_VIT):
        raise NotImplementedError(f"arguments without a usual value: {sorted(missing)}")
    model = found[-1](**{name: value for name, value in _VIT.items() if name in known})
    if "frames" in known:
        return classifier(model, torch.randn(BATCH, 3, 4, IMAGE, IMAGE))
    return classifier(model, torch.randn(BATCH, 3, 64) if "seq_len" in known else image())


# ---- monai ----


def monai_entries() -> Iterator[Entry]:
    """Networks for volumes."""
    for name, (config, channels, size) in _MONAI.items():
        yield Entry(package="monai", name=name, build=partial(_monai, name.split()[0], config, channels, size))


def _monai(name: str, config: Mapping[str, Any], channels: int, size: int) -> Built:
    from monai.networks import nets

    return with_square(getattr(nets, name)(**config), image(channels, size, config.get("spatial_dims", 3)))


_IN_OUT = {"in_channels": 1, "out_channels": 2}
_3D = {"spatial_dims": 3, **_IN_OUT}
_MONAI: Mapping[str, tuple[Mapping[str, Any], int, int]] = {
    "UNet": ({**_3D, "channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1}, 1, 32),
    "UNet 2d": ({**_3D, "spatial_dims": 2, "channels": (8, 16, 32), "strides": (2, 2)}, 1, 32),
    "AttentionUnet": ({**_3D, "channels": (8, 16, 32), "strides": (2, 2)}, 1, 32),
    "BasicUNet": ({**_3D, "features": (8, 8, 16, 32, 64, 8)}, 1, 32),
    "BasicUNetPlusPlus": ({**_3D, "features": (8, 8, 16, 32, 64, 8)}, 1, 32),
    "DynUNet": ({**_3D, "kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2)}, 1, 32),
    "SegResNet": ({**_3D, "init_filters": 8}, 1, 32),
    "SegResNetVAE": ({**_3D, "init_filters": 8, "input_image_size": (32, 32, 32)}, 1, 32),
    "SegResNetDS": ({"spatial_dims": 3, "init_filters": 8, **_IN_OUT}, 1, 32),
    "VNet": ({**_3D}, 1, 32),
    "HighResNet": ({**_3D}, 1, 16),
    "UNETR": ({**_IN_OUT, "img_size": 32, "hidden_size": 96, "num_heads": 4, "mlp_dim": 128}, 1, 32),
    "SwinUNETR": ({**_IN_OUT, "feature_size": 12}, 1, 64),
    "MedNeXt": ({"spatial_dims": 3, "init_filters": 8, **_IN_OUT}, 1, 32),
    "DenseNet121": ({**_3D}, 1, 32),
    "EfficientNetBN": ({"model_name": "efficientnet-b0", "spatial_dims": 3, "in_channels": 1, "pretrained": False},
                       1, 64),
    "ResNet": ({"block": "basic", "layers": (1, 1, 1, 1), "block_inplanes": (8, 16, 32, 64), "n_input_channels": 1},
               1, 32),
    "SENet154": ({"spatial_dims": 3, "in_channels": 1, "num_classes": 2, "pretrained": False}, 1, 64),
    "ViT": ({"in_channels": 1, "img_size": 32, "patch_size": 16, "hidden_size": 96, "mlp_dim": 128, "num_layers": 2,
             "num_heads": 4}, 1, 32),
    "AutoEncoder": ({**_3D, "channels": (8, 16), "strides": (2, 2)}, 1, 32),
    "Discriminator": ({"in_shape": (1, 32, 32), "channels": (8, 16), "strides": (2, 2), "spatial_dims": 2}, 1, 32),
    "FlexibleUNet": ({**_IN_OUT, "backbone": "efficientnet-b0", "spatial_dims": 2}, 1, 64),
}  # fmt: skip


# ---- segmentation_models_pytorch ----


def segmentation_entries() -> Iterator[Entry]:
    """Every architecture on two encoders."""
    import segmentation_models_pytorch as smp

    for name, kind in smp.MODEL_ARCHITECTURES_MAPPING.items():
        for encoder in ("resnet18", "mobilenet_v2", "tu-convnext_atto"):
            yield Entry(
                package="segmentation_models_pytorch",
                name=f"{name} {encoder}",
                build=partial(_segmentation, kind, encoder),
            )


def _segmentation(kind: Callable[..., nn.Module], encoder: str) -> Built:
    return with_square(kind(encoder, encoder_weights=None, classes=2), image(size=128))


# ---- x_transformers: one model for each option ----

_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {}, {"rotary_pos_emb": True}, {"alibi_pos_bias": True, "alibi_num_heads": 2}, {"rel_pos_bias": True},
    {"use_rmsnorm": True}, {"ff_glu": True, "ff_swish": True}, {"attn_qk_norm": True}, {"attn_kv_heads": 2},
    {"attn_one_kv_head": True}, {"attn_num_mem_kv": 4}, {"attn_talking_heads": True}, {"attn_sparse_topk": 8},
    {"sandwich_norm": True}, {"macaron": True}, {"residual_attn": True}, {"gate_residual": True},
    {"scale_residual": True}, {"shift_tokens": 1}, {"attn_gate_values": True}, {"attn_flash": True},
    {"dynamic_pos_bias": True}, {"ff_post_act_ln": True}, {"attn_softclamp_logits": True}, {"use_scalenorm": True},
    {"resi_dual": True}, {"deepnorm": True}, {"attn_laser": True}, {"use_layerscale": True}, {"ff_relu_squared": True},
    {"attn_value_dim_head": 24}, {"num_residual_streams": 2}, {"polar_pos_emb": True}, {"rotary_xpos": True},
    {"attn_selective": True}, {"attn_learned_value_residual_mix": True, "add_value_residual": True},
)  # fmt: skip


def x_transformers_entries() -> Iterator[Entry]:
    """A decoder with each option."""
    for options in _OPTIONS:
        yield Entry(
            package="x_transformers", name=", ".join(options) or "plain", build=partial(_x_transformers, options)
        )


def _x_transformers(options: Mapping[str, Any]) -> Built:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **options)
    model = TransformerWrapper(num_tokens=256, max_seq_len=TOKENS, attn_layers=layers)
    tokens = torch.randint(0, 256, (BATCH, TOKENS))
    return model, (tokens, torch.randint(0, 256, (BATCH, TOKENS))), token_loss


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of (batch, tokens, vocabulary)."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


PACKAGES: Mapping[str, Callable[[], Iterator[Entry]]] = {
    "diffusers": diffusers_entries,
    "monai": monai_entries,
    "segmentation_models_pytorch": segmentation_entries,
    "timm": timm_entries,
    "torchvision": torchvision_entries,
    "transformers": transformers_entries,
    "vit_pytorch": vit_pytorch_entries,
    "x_transformers": x_transformers_entries,
}


def entries() -> Iterator[Entry]:
    """All models of the packages that are installed."""
    for package, found in PACKAGES.items():
        if importlib.util.find_spec(package) is not None:
            yield from found()
