"""The way from an `nn.Module` to a folded program of ATen operators, and its axes.

It may import `autopar.ir`, `autopar.rules`, `autopar.files` and `autopar._torch`. Nothing here decides or runs a plan.
"""
