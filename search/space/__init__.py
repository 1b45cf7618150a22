"""The candidates of a search, the constraints that limit them, and the parts of a cluster that they may use.

Imports `autopar.ir`, `autopar.errors` and the distinct rows of the cost model.
"""
