"""A module that asks for more memory than there is on rank 1."""

import os

import torch

if os.environ.get("RANK") == "1":
    torch.empty(2**50)
