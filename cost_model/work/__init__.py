"""What one call of a block computes, moves, sends and saves, as expressions in named sizes; no seconds.

It imports `autopar.cost_model.machine` of the cost model.
"""
