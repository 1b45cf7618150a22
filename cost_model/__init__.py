"""Predicts seconds and bytes of a training step. `estimate` and `pricing` price a plan; the rooms hold the formulas.

It imports `autopar.ir`, `autopar.capture`, `autopar.rules` and `autopar.lowering`, and never `search` or `runtime`.
"""
