"""The ATen operators under the name `aten`, as in PyTorch's own code."""

import torch

aten = torch.ops.aten
