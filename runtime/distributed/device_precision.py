"""The precisions that a device can compute in."""

import torch

from autopar.errors import Problem
from autopar.rules.scaled_product import CAPABILITIES


def precision_problems(precision: str | None, device: torch.device) -> list[Problem]:
    """Why a device cannot compute in a precision. A CPU emulates all of them."""
    needed = CAPABILITIES.get(precision or "")
    if needed is None or device.type != "cuda":
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability >= needed:
        return []
    name, words = torch.cuda.get_device_name(device), [".".join(map(str, version)) for version in (needed, capability)]
    rule = f"needs compute capability {words[0]}, and {name} has {words[1]}"
    return [Problem(path="precision", value=precision, rule=rule, suggestion="use bf16")]
