"""The FLOP, memory traffic, collectives and saved tensors of one call of a block, as expressions. There are no seconds.

It imports `autopar.cost_model.machine` of the cost model.
"""
