"""A plan's own generated program, run on sizes instead of tensors: its messages, its saved tensors, its memory.

It imports the rooms `work` and `machine`.
"""
