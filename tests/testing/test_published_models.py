"""Models of other packages, whose small operators no degree divides, equal one device."""

from collections.abc import Callable

import pytest
import torch
from suites import long
from torch import nn

from autopar.testing import check_equivalence

pytestmark = pytest.mark.long
Example = tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]
CLASSES, BATCH, SIZE = 10, 4, 64


def of_timm(name: str, **options: object) -> Example:
    timm = pytest.importorskip("timm")
    return timm.create_model(name, num_classes=CLASSES, **options), pictures()


def of_vit_pytorch(module: str, name: str, **options: object) -> Example:
    package = pytest.importorskip(f"vit_pytorch.{module}")
    return getattr(package, name)(image_size=SIZE, num_classes=CLASSES, heads=3, **options), pictures()


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 3, SIZE, SIZE), torch.arange(BATCH) % CLASSES


MODELS: dict[str, Callable[[], Example]] = {
    "three_heads": lambda: of_timm("deit_tiny_patch16_224", img_size=SIZE, depth=2),
    "residual_network": lambda: of_timm("resnet18"),
    "windows": lambda: of_timm(
        "swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1, 1, 1), num_heads=(3, 3, 3, 3)
    ),
    "shared_pooling": lambda: of_vit_pytorch(
        "nest", "NesT", patch_size=4, dim=24, num_hierarchies=2, block_repeats=(1, 1)
    ),
    "dead_views": lambda: of_vit_pytorch("rvt", "RvT", patch_size=16, dim=48, depth=2, mlp_dim=64),
}


@pytest.mark.parametrize("mesh", [long({"tp": 2}), long({"tp": 3}), {"tp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_one_device(name: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    if name == "windows":
        inputs = inputs[0][..., :56, :56], inputs[1]
    for module in model.modules():
        if type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    assert check_equivalence(model, inputs, **mesh, loss_fn=nn.functional.cross_entropy).passed
