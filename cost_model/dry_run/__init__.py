"""A plan's own generated program, run on sizes instead of tensors: what it sends, saves and holds.

It imports the rooms `work` and `machine`.
"""
