"""Checkpoints on disk: a folder for each step, a manifest with sizes and hashes, and files of safetensors.

`folder`, `manifest` and `lock` do not import torch. Of the runtime, the room may import `parameters` and below.
"""
