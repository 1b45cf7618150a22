"""The models of the operator census: built from configurations, on meta, from whatever packages are installed.

`names` lists the models of a package, and `build` makes one of them: (model, example inputs, loss function).
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, Any, Callable[..., torch.Tensor] | None]
BATCH = 4
TOKENS = 64
PER_FAMILY = 2


def installed() -> tuple[str, ...]:
    """The packages of the census that can be imported."""
    return tuple(name for name in PACKAGES if importlib.util.find_spec(name) is not None)


def names(package: str) -> list[str]:
    """The models of a package."""
    found: list[str] = PACKAGES[package][0]()
    return found


def build(package: str, name: str) -> Built:
    """A model of a package, its inputs and its loss. Parameters are on meta if the model can be built there."""
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            return _on_meta(PACKAGES[package][1](name))
    except Exception:  # it reads a value while it is built
        return _on_meta(PACKAGES[package][1](name))


def _on_meta(built: Built) -> Built:
    model, inputs, loss = built
    move: Callable[[Any], Any] = lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t  # noqa: E731
    moved = {k: move(v) for k, v in inputs.items()} if isinstance(inputs, Mapping) else tuple(map(move, inputs))
    return model.to("meta").train(), moved, loss


def mean_of_tensors(out: Any, target: torch.Tensor) -> torch.Tensor:
    """A loss for outputs of any form: the mean square of every floating tensor, summed."""
    leaves, _ = torch.utils._pytree.tree_flatten(dict(out) if isinstance(out, Mapping) else out)
    parts = [leaf.float().square().mean() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]
    total: torch.Tensor = torch.stack(parts).sum() + 0 * target.sum()
    return total


def _with_target(model: nn.Module, *inputs: Any) -> Built:
    return model, (*inputs, torch.zeros(BATCH)), mean_of_tensors


def _image(size: int = 64, channels: int = 3) -> torch.Tensor:
    return torch.zeros(BATCH, channels, size, size)


def _timm_names() -> list[str]:
    import timm

    found = []
    for module in timm.list_modules():
        known = [name for name in timm.list_models(module=module) if "test_" not in name]
        found += known[:1] + known[len(known) // 2 :][: PER_FAMILY - 1] if len(known) > 1 else known
    return sorted(set(found))


def _timm(name: str) -> Built:
    import timm

    model = timm.create_model(name, pretrained=False)
    return _with_target(model, torch.zeros(BATCH, *model.default_cfg["input_size"]))


def _torchvision_names() -> list[str]:
    import torchvision

    by_family: dict[str, list[str]] = {}
    for name in torchvision.models.list_models():
        function = torchvision.models.get_model_builder(name)
        if "quant" not in name and "detection" not in function.__module__:
            by_family.setdefault(function.__module__, []).append(name)
    return sorted(name for known in by_family.values() for name in known[:PER_FAMILY])


def _torchvision(name: str) -> Built:
    import torchvision

    module = torchvision.models.get_model_builder(name).__module__
    model = torchvision.models.get_model(
        name, weights=None, **({} if "raft" in name else {"weights_backbone": None} if "segmentation" in module else {})
    )
    if "raft" in name:
        return _with_target(model, _image(128), _image(128))
    if "video" in module:
        size = 224 if "mvit" in name or "swin" in name else 64
        return _with_target(model, torch.zeros(BATCH, 3, 16, size, size))
    return _with_target(model, _image(299 if "inception" in name else 224))


_TRANSFORMERS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}


def _transformers_names() -> list[str]:
    from transformers.models.auto import modeling_auto

    return [f"{kind}:{model}" for kind, table in _TRANSFORMERS.items() for model in getattr(modeling_auto, table)]


def _transformers(name: str) -> Built:
    import transformers
    from transformers.models.auto import modeling_auto

    from autopar.models.example_inputs import example_inputs_for

    kind, model_type = name.split(":")
    config = transformers.CONFIG_MAPPING[model_type]()
    for key in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"):
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, 2)
    for key in ("layer_types", "layers_block_type"):
        if isinstance(getattr(config, key, None), list):
            setattr(config, key, getattr(config, key)[:2])
    found = getattr(modeling_auto, _TRANSFORMERS[kind])[model_type]
    found = found if isinstance(found, str) else found[0]
    model = getattr(transformers, found)(config)
    return model, example_inputs_for(model, batch=BATCH, seq_len=TOKENS if kind != "image" else None), None


_VIT = {"image_size": 64, "patch_size": 8, "num_classes": 10, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128}
_VIT_NAMES = {
    "vit.ViT": {}, "simple_vit.SimpleViT": {}, "deepvit.DeepViT": {}, "cait.CaiT": {"cls_depth": 1},
    "simple_vit_with_qk_norm.SimpleViT": {}, "simple_vit_with_register_tokens.SimpleViT": {},
    "simple_vit_with_patch_dropout.SimpleViT": {}, "simple_vit_with_value_residual.SimpleViT": {},
    "simple_vit_with_hyper_connections.SimpleViT": {"num_residual_streams": 2}, "simple_flash_attn_vit.SimpleViT": {},
    "simple_vit_with_fft.SimpleViT": {"freq_patch_size": 8},
    "vit_with_patch_merger.ViT": {}, "vit_for_small_dataset.ViT": {}, "parallel_vit.ViT": {}, "rvt.RvT": {},
    "look_vit.LookViT": None, "normalized_vit.nViT": None, "vit_1d.ViT": None, "vit_3d.ViT": None, "xcit.XCiT": {"cls_depth": 1},
    "local_vit.LocalViT": {}, "levit.LeViT": None, "cvt.CvT": None, "crossformer.CrossFormer": None,
    "pit.PiT": None, "t2t.T2TViT": None, "twins_svt.TwinsSVT": None, "regionvit.RegionViT": None, "max_vit.MaxViT": None,
    "mobile_vit.MobileViT": None, "sep_vit.SepViT": None, "nest.NesT": None, "scalable_vit.ScalableViT": None,
    "cct.cct_2": None, "learnable_memory_vit.ViT": {}, "jumbo_vit.JumboViT": None,
}  # fmt: skip
_VIT_OWN: dict[str, dict[str, Any]] = {
    "vit_1d.ViT": {"seq_len": 64, "patch_size": 8, "num_classes": 10, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128},
    "vit_3d.ViT": {**_VIT, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2},
    "levit.LeViT": {"image_size": 224, "num_classes": 10, "dim": (64, 96), "depth": 2, "heads": (4, 6), "mlp_mult": 2, "stages": 2},
    "cvt.CvT": {"num_classes": 10}, "crossformer.CrossFormer": {"num_classes": 10}, "twins_svt.TwinsSVT": {"num_classes": 10},
    "regionvit.RegionViT": {"num_classes": 10}, "cct.cct_2": {"img_size": 64, "num_classes": 10},
    "pit.PiT": {"image_size": 224, "patch_size": 14, "num_classes": 10, "dim": 64, "depth": (1, 1), "heads": 4, "mlp_dim": 128},
    "t2t.T2TViT": {"image_size": 224, "num_classes": 10, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128},
    "max_vit.MaxViT": {"num_classes": 10, "dim_conv_stem": 32, "dim": 32, "dim_head": 16, "depth": (1, 1), "window_size": 7},
    "mobile_vit.MobileViT": {"image_size": (256, 256), "dims": [96, 120, 144], "channels": [16, 32, 48, 48, 64, 64, 80, 80, 96, 96, 384], "num_classes": 10},
    "sep_vit.SepViT": {"num_classes": 10, "dim": 32, "dim_head": 16, "heads": (1, 2), "depth": (1, 1), "window_size": 7},
    "nest.NesT": {"image_size": 224, "patch_size": 4, "num_classes": 10, "dim": 96, "heads": 3, "num_hierarchies": 3, "block_repeats": (1, 1, 1)},
    "scalable_vit.ScalableViT": {"num_classes": 10, "dim": 64, "heads": (2, 4), "depth": (1, 1), "ssa_dim_key": (40, 40), "reduction_factor": (8, 4), "window_size": (64, 32)},
    "jumbo_vit.JumboViT": {**_VIT, "num_jumbo_cls": 1, "jumbo_cls_k": 2},
    "normalized_vit.nViT": {k: v for k, v in _VIT.items() if k != "mlp_dim"},
    "look_vit.LookViT": {"dim": 64, "image_size": 64, "num_classes": 10, "depth": 2, "patch_size": 8, "heads": 4, "dim_head": 16},
}  # fmt: skip


def _vit_names() -> list[str]:
    return list(_VIT_NAMES)


def _vit(name: str) -> Built:
    module, kind = name.split(".")
    extra = _VIT_NAMES[name]
    settings = _VIT_OWN[name] if extra is None else {**_VIT, **extra}
    if name == "local_vit.LocalViT":
        settings = {**_VIT, **(extra or {})}
    model = getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(**settings)
    if name == "vit_1d.ViT":
        return _with_target(model, torch.zeros(BATCH, 3, 64))
    if name == "vit_3d.ViT":
        return _with_target(model, torch.zeros(BATCH, 3, 4, 64, 64))
    given = settings.get("image_size", settings.get("img_size", 224))
    return _with_target(model, _image(given if isinstance(given, int) else given[0]))


_X_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True}, "t5_bias": {"rel_pos_bias": True},
    "flash": {"attn_flash": True}, "rmsnorm": {"use_rmsnorm": True}, "scalenorm": {"use_scalenorm": True},
    "glu": {"ff_glu": True}, "swish": {"ff_swish": True, "ff_glu": True}, "relu_squared": {"ff_relu_squared": True},
    "talking_heads": {"attn_talking_heads": True}, "memory_kv": {"attn_num_mem_kv": 4}, "one_kv_head": {"attn_one_kv_head": True},
    "grouped": {"attn_kv_heads": 2}, "qk_norm": {"attn_qk_norm": True}, "sandwich": {"sandwich_norm": True}, "resi_dual": {"resi_dual": True},
    "macaron": {"macaron": True}, "gate_residual": {"gate_residual": True}, "shift": {"shift_tokens": 1}, "xpos": {"rotary_xpos": True, "rotary_pos_emb": True},
    "sparse_topk": {"attn_sparse_topk": 8}, "value_residual": {"add_value_residual": True}, "hyper": {"num_residual_streams": 2},
    "gate_values": {"attn_gate_values": True}, "dynamic_pos": {"dynamic_pos_bias": True}, "laser": {"attn_laser": True}, "softclamp": {"attn_softclamp_logits": True},
}  # fmt: skip


def _x_names() -> list[str]:
    return [f"{kind}:{name}" for kind in ("decoder", "encoder") for name in _X_OPTIONS]


def _x(name: str) -> Built:
    import x_transformers

    kind, option = name.split(":")
    layers = {"decoder": x_transformers.Decoder, "encoder": x_transformers.Encoder}[kind]
    stack = layers(dim=128, depth=2, heads=4, **_X_OPTIONS[option])
    model = x_transformers.TransformerWrapper(num_tokens=256, max_seq_len=TOKENS, attn_layers=stack)
    return _with_target(model, torch.zeros(BATCH, TOKENS, dtype=torch.long))


_SMP = (
    "Unet",
    "UnetPlusPlus",
    "MAnet",
    "Linknet",
    "FPN",
    "PSPNet",
    "DeepLabV3",
    "DeepLabV3Plus",
    "PAN",
    "UPerNet",
    "Segformer",
    "DPT",
)
_ENCODERS = ("resnet18", "mobilenet_v2", "efficientnet-b0", "densenet121", "mit_b0", "vgg11")


def _smp_names() -> list[str]:
    return [f"{kind}:{encoder}" for kind in _SMP[:-1] for encoder in _ENCODERS[: 2 if kind != "Unet" else None]] + [
        "DPT:tu-vit_tiny_patch16_224.augreg_in21k"
    ]


def _smp(name: str) -> Built:
    import segmentation_models_pytorch as smp

    kind, encoder = name.split(":")
    model = getattr(smp, kind)(encoder, encoder_weights=None, classes=4)
    return _with_target(model, _image(224 if kind == "DPT" else 128))


_VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 4}
_MONAI: dict[str, dict[str, Any]] = {
    "UNet": {**_VOLUME, "channels": (16, 32, 64), "strides": (2, 2), "num_res_units": 2}, "BasicUNet": _VOLUME, "SegResNet": _VOLUME,
    "SegResNetDS": _VOLUME, "VNet": {}, "AttentionUnet": {**_VOLUME, "channels": (16, 32, 64), "strides": (2, 2)}, "HighResNet": {},
    "DynUNet": {**_VOLUME, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}, "UNETR": {"in_channels": 1, "out_channels": 4, "img_size": (32, 32, 32)},
    "SwinUNETR": {"in_channels": 1, "out_channels": 4, "feature_size": 12}, "DenseNet121": {"spatial_dims": 3, "in_channels": 1, "out_channels": 4}, "SEResNet50": {"spatial_dims": 3, "in_channels": 1, "num_classes": 4},
    "BasicUNetPlusPlus": _VOLUME, "ViT": {"in_channels": 1, "img_size": (32, 32, 32), "patch_size": (8, 8, 8), "classification": True}, "ViTAutoEnc": {"in_channels": 1, "img_size": (32, 32, 32), "patch_size": (8, 8, 8)},
    "AutoEncoder": {**_VOLUME, "channels": (8, 16), "strides": (2, 2)}, "resnet18": {"spatial_dims": 3, "n_input_channels": 1}, "EfficientNetBN": {"model_name": "efficientnet-b0", "spatial_dims": 3, "in_channels": 1, "pretrained": False},
    "MedNeXtS": {"spatial_dims": 3, "in_channels": 1, "out_channels": 4}, "DiffusionModelUNet": None, "AutoencoderKL": None, "VQVAE": None, "DAF3D": None, "PatchDiscriminator": None,
}  # fmt: skip


def _monai_names() -> list[str]:
    return [name for name, settings in _MONAI.items() if settings is not None]


def _monai(name: str) -> Built:
    from monai.networks import nets

    model = getattr(nets, name)(**(_MONAI[name] or {}))
    size = 64 if name in ("SwinUNETR", "DenseNet121", "SEResNet50") else 32
    return _with_target(model, torch.zeros(BATCH, 1, size, size, size))


_GRAPHS = ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN", "MLP", "LightGCN", "GraphUNet")


def _graphs_names() -> list[str]:
    return list(_GRAPHS)


def _graphs(name: str) -> Built:
    from torch_geometric.nn import models

    if name == "MLP":
        return _with_target(models.MLP([16, 32, 4]), torch.zeros(BATCH * 8, 16))
    if name == "LightGCN":
        return _with_target(models.LightGCN(32, 16, 2), torch.zeros(2, 64, dtype=torch.long))
    if name == "GraphUNet":
        return _with_target(models.GraphUNet(16, 32, 4, 2), torch.zeros(32, 16), torch.zeros(2, 64, dtype=torch.long))
    extra = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(8)} if name == "PNA" else {}
    model = getattr(models, name)(16, 32, 2, 4, **extra)
    return _with_target(model, torch.zeros(32, 16), torch.zeros(2, 64, dtype=torch.long))


_LATENT = torch.Size((BATCH, 4, 16, 16))
_DIFFUSERS: dict[str, tuple[dict[str, Any], str]] = {
    "UNet2DModel": ({"sample_size": 32, "block_out_channels": (32, 64), "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}, "image"),
    "UNet2DConditionModel": ({"sample_size": 16, "cross_attention_dim": 64, "block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}, "latent"),
    "AutoencoderKL": ({"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}, "plain"),
    "VQModel": ({}, "plain"), "AutoencoderTiny": ({}, "plain"), "AsymmetricAutoencoderKL": ({}, "plain"),
    "DiTTransformer2DModel": ({"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2, "sample_size": 16}, "class"),
    "PixArtTransformer2DModel": ({"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2, "sample_size": 16, "cross_attention_dim": 64, "caption_channels": 64}, "latent"),
    "Transformer2DModel": ({"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 32}, "tokens"),
    "SD3Transformer2DModel": ({"sample_size": 16, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "joint_attention_dim": 64, "caption_projection_dim": 64, "pooled_projection_dim": 32, "pos_embed_max_size": 16}, "pooled"),
}  # fmt: skip


def _diffusers_names() -> list[str]:
    return list(_DIFFUSERS)


def _diffusers(name: str) -> Built:
    import diffusers

    settings, kind = _DIFFUSERS[name]
    model = getattr(diffusers, name)(**settings)
    steps, text, latent = torch.zeros(BATCH, dtype=torch.long), torch.zeros(BATCH, 8, 64), torch.zeros(_LATENT)
    target = {"target": torch.zeros(BATCH)}
    inputs: dict[str, dict[str, Any]] = {
        "plain": {"sample": _image(64)},
        "image": {"sample": _image(32), "timestep": steps},
        "latent": {"sample" if "UNet" in name else "hidden_states": latent, "timestep": steps, "encoder_hidden_states": text},
        "class": {"hidden_states": latent, "timestep": steps, "class_labels": steps},
        "tokens": {"hidden_states": torch.zeros(BATCH, 32, 16, 16)},
        "pooled": {"hidden_states": latent, "encoder_hidden_states": text, "pooled_projections": torch.zeros(BATCH, 32), "timestep": steps},
    }  # fmt: skip
    if name == "AutoencoderTiny" or kind == "plain":
        return _with_target(model, _image(64))
    return model, inputs[kind] | target, mean_of_tensors


Package = tuple[Callable[[], Sequence[str]], Callable[[str], Built]]
PACKAGES: dict[str, Any] = {
    "transformers": (_transformers_names, _transformers),
    "timm": (_timm_names, _timm),
    "torchvision": (_torchvision_names, _torchvision),
    "diffusers": (_diffusers_names, _diffusers),
    "vit_pytorch": (_vit_names, _vit),
    "x_transformers": (_x_names, _x),
    "segmentation_models_pytorch": (_smp_names, _smp),
    "monai": (_monai_names, _monai),
    "torch_geometric": (_graphs_names, _graphs),
}
