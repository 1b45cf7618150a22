"""ATen's operators under the name that torch's own code gives them."""

import torch

aten = torch.ops.aten
