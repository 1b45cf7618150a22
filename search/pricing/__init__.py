"""Exact prices of candidates: stages cut, recomputation chosen, action lists replayed.

Imports `bounds`, `space` and `result` of the search, and the cost model.
"""
