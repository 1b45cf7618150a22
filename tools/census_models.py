"""The models of the census: as their packages build them, from configurations, without weights.

Every package is a function that gives entries. An entry builds a model and inputs for one training step. It is called
under `torch.device("meta")`, so no model takes memory. A package that is not installed has no entries.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from census_inputs import (
    BATCH,
    CLASSES,
    IMAGE,
    TOKENS,
    Built,
    Entry,
    Part,
    classifier,
    first_that_runs,
    image,
    with_square,
)
from census_transformers import transformers_entries
from torch import nn

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
    "num_hierarchies": 2, "max_patches": 16, "sm_dim": 64, "lg_dim": 128, "sm_patch_size": 8, "lg_patch_size": 16,
    "num_slots": 4, "reduction_factor": (8, 4, 2, 1), "ndim": 2, "input_shape": (IMAGE, IMAGE), "img_size": IMAGE,
    "embedding_dim": 64, "num_layers": 2, "num_heads": 4, "max_frames": 4, "mlp_ratio": 2, "num_frames": 4,
}  # fmt: skip
_OF_STAGES: Mapping[str, Any] = {"depth": (1, 1, 1, 1)}
_MORE: tuple[Mapping[str, Any], ...] = (  # tried in this order, until a model can be called
    {}, _OF_STAGES, {"depth": (1, 2), "image_size": 128}, {"image_size": 224}, {**_OF_STAGES, "image_size": 224},
    {"image_size": 224, "depth": (1, 2)}, {"patch_size": 1}, {**_OF_STAGES, "image_size": 256},
    {"image_size": (256, 256), "patch_size": (2, 2), "dims": (32, 48, 64),
     "channels": (16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 128)},
)  # fmt: skip
_ENDS = (classifier, with_square)  # some models return more than logits


def vit_pytorch_entries() -> Iterator[Entry]:
    """The classes of vit_pytorch that take the usual arguments and classify images."""
    import vit_pytorch

    for info in pkgutil.iter_modules(vit_pytorch.__path__):
        yield Entry(package="vit_pytorch", name=info.name, build=partial(_vit_pytorch, info.name))


def _vit_pytorch(file: str) -> Built:
    module = importlib.import_module(f"vit_pytorch.{file}")
    models = [
        kind for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__
    ]  # fmt: skip
    found = [kind for kind in models if "num_classes" in inspect.signature(kind).parameters]
    if not found and "img_size" in inspect.signature(models[-1]).parameters:
        found = models[-1:]  # passes `num_classes` on
    if not found:
        raise NotImplementedError("no class takes num_classes")
    return first_that_runs(partial(_vit, found[-1], {**_VIT, **more}, end) for end in _ENDS for more in _MORE)


def _vit(kind: Callable[..., nn.Module], values: Mapping[str, Any], end: Callable[..., Built]) -> Built:
    known = inspect.signature(kind).parameters
    needed = {
        n for n, p in known.items() if (p.default is p.empty and p.kind is p.KEYWORD_ONLY) or n in ("dim", "depth")
    }
    if missing := needed - set(values):
        raise NotImplementedError(f"arguments without a usual value: {sorted(missing)}")
    passed_on = ("num_classes", "num_layers", "num_heads", "mlp_ratio") if "img_size" in known else ()
    model = kind(**{name: value for name, value in values.items() if name in known or name in passed_on})
    size = values["image_size"] if isinstance(values["image_size"], int) else values["image_size"][0]
    if "frames" in known or "num_frames" in known:
        return end(model, torch.randn(BATCH, 3, 4, size, size))
    return end(model, torch.randn(BATCH, 3, 64) if "seq_len" in known else image(size=size))


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
        of_any = ("resnet18", "mobilenet_v2", "tu-convnext_atto")
        for encoder in ("tu-vit_tiny_patch16_224",) if name == "dpt" else of_any:
            yield Entry(
                package="segmentation_models_pytorch",
                name=f"{name} {encoder}",
                build=partial(_segmentation, kind, encoder),
            )


def _segmentation(kind: Callable[..., nn.Module], encoder: str) -> Built:
    size = 224 if "224" in encoder else 128
    more = {"dynamic_img_size": True} if "vit" in encoder else {}
    return with_square(kind(encoder, encoder_weights=None, classes=2, **more), image(size=size))


# ---- x_transformers: one model for each option ----

_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {}, {"rotary_pos_emb": True}, {"alibi_pos_bias": True, "alibi_num_heads": 2}, {"rel_pos_bias": True},
    {"use_rmsnorm": True}, {"ff_glu": True, "ff_swish": True}, {"attn_qk_norm": True}, {"attn_kv_heads": 2},
    {"attn_one_kv_head": True}, {"attn_num_mem_kv": 4}, {"attn_talking_heads": True}, {"attn_sparse_topk": 8},
    {"sandwich_norm": True}, {"macaron": True}, {"residual_attn": True}, {"gate_residual": True},
    {"scale_residual": True}, {"shift_tokens": 1}, {"attn_gate_values": True}, {"attn_flash": True},
    {"dynamic_pos_bias": True}, {"ff_post_act_ln": True}, {"attn_softclamp_logits": True}, {"use_scalenorm": True},
    {"deepnorm": True}, {"attn_laser": True}, {"use_layerscale": True}, {"ff_relu_squared": True},
    {"attn_value_dim_head": 24}, {"num_residual_streams": 2}, {"polar_pos_emb": True}, {"rotary_xpos": True},
    {"attn_selective": True}, {"add_value_residual": True, "learned_value_residual_mix": True},
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


# ---- torch_geometric: networks of a graph's nodes, with a list of edges ----

_GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "GCN": {}, "GraphSAGE": {}, "GIN": {}, "GAT": {"heads": 4}, "GAT v2": {"v2": True, "heads": 4}, "EdgeCNN": {},
    "GCN cat": {"jk": "cat"}, "GraphSAGE lstm": {"jk": "lstm"}, "GIN norm": {"norm": "batch_norm"},
    "PNA": {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": None},
}  # fmt: skip
NODES, EDGES, FEATURES = 64, 256, 32


def torch_geometric_entries() -> Iterator[Entry]:
    """Networks that classify the nodes of a graph."""
    for name, options in _GRAPHS.items():
        yield Entry(package="torch_geometric", name=name, build=partial(_graph, name.split()[0], options))


def _graph(name: str, options: Mapping[str, Any]) -> Built:
    from torch_geometric.nn import models

    given = {**options, "deg": torch.ones(8, dtype=torch.int64, device="cpu")} if "deg" in options else options
    with torch.device("cpu"):
        model = getattr(models, name)(FEATURES, 64, 2, CLASSES, **given)
    edges = torch.randint(0, NODES, (2, EDGES))
    return model, (torch.randn(NODES, FEATURES), edges, torch.randint(0, CLASSES, (NODES,))), F.cross_entropy


PACKAGES: Mapping[str, Callable[[], Iterator[Entry]]] = {
    "diffusers": diffusers_entries,
    "monai": monai_entries,
    "segmentation_models_pytorch": segmentation_entries,
    "timm": timm_entries,
    "torch_geometric": torch_geometric_entries,
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
