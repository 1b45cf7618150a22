"""The models of the operator census: built from configurations, on meta, from whatever packages are installed.

`names` lists the models of a package, and `build` makes one of them: (model, example inputs, loss function).
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from census_settings import DIFFUSERS, MONAI, VIT, VIT_NAMES, VIT_OWN, X_OPTIONS
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


def _vit_names() -> list[str]:
    return list(VIT_NAMES)


def _vit(name: str) -> Built:
    module, kind = name.split(".")
    extra = VIT_NAMES[name]
    settings = VIT_OWN[name] if extra is None else {**VIT, **extra}
    if name == "local_vit.LocalViT":
        settings = {**VIT, **(extra or {})}
    model = getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(**settings)
    if name == "vit_1d.ViT":
        return _with_target(model, torch.zeros(BATCH, 3, 64))
    if name == "vit_3d.ViT":
        return _with_target(model, torch.zeros(BATCH, 3, 4, 64, 64))
    given = settings.get("image_size", settings.get("img_size", 224))
    return _with_target(model, _image(given if isinstance(given, int) else given[0]))


def _x_names() -> list[str]:
    return [f"{kind}:{name}" for kind in ("decoder", "encoder") for name in X_OPTIONS]


def _x(name: str) -> Built:
    import x_transformers

    kind, option = name.split(":")
    layers = {"decoder": x_transformers.Decoder, "encoder": x_transformers.Encoder}[kind]
    stack = layers(dim=128, depth=2, heads=4, **X_OPTIONS[option])
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


def _monai_names() -> list[str]:
    return [name for name, settings in MONAI.items() if settings is not None]


def _monai(name: str) -> Built:
    from monai.networks import nets

    model = getattr(nets, name)(**(MONAI[name] or {}))
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


def _diffusers_names() -> list[str]:
    return list(DIFFUSERS)


def _diffusers(name: str) -> Built:
    import diffusers

    settings, kind = DIFFUSERS[name]
    model = getattr(diffusers, name)(**settings)
    steps, text, latent = torch.zeros(BATCH, dtype=torch.long), torch.zeros(BATCH, 8, 64), torch.zeros(_LATENT)
    target = {"target": torch.zeros(BATCH)}
    inputs: dict[str, dict[str, Any]] = {
        "plain": {"sample": _image(64)},
        "image": {"sample": _image(32), "timestep": steps},
        "latent": {
            "sample" if "UNet" in name else "hidden_states": latent,
            "timestep": steps,
            "encoder_hidden_states": text,
        },
        "class": {"hidden_states": latent, "timestep": steps, "class_labels": steps},
        "tokens": {"hidden_states": torch.zeros(BATCH, 32, 16, 16)},
        "pooled": {
            "hidden_states": latent,
            "encoder_hidden_states": text,
            "pooled_projections": torch.zeros(BATCH, 32),
            "timestep": steps,
        },
    }
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
