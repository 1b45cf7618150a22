"""Bytes of a rank: the formula for equal stages, the count for a plan's own stages, and a lower bound.

It imports the rooms `pipeline`, `step`, `work` and `machine`.
"""
