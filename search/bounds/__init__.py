"""Lower bounds of step time and memory for all candidates at once, as arrays.

Imports `autopar.cost_model` and `search.space`.
"""
