"""Imports and `torch.export` of a whole preset and nothing else: `python benchmarks/export_alone.py MODEL SEQUENCE`.

It is the peer of a cold command, and compares machines, because all its work is PyTorch's.
"""

import sys

import torch

from autopar.models.load import resolve_model


def main() -> None:
    model, sequence = sys.argv[1:]
    found = resolve_model(model, seq_len=int(sequence), batch=2)
    torch.export.export(found.model, (), dict(found.example_inputs))


if __name__ == "__main__":
    main()
