"""How parameters are stored: initial weights, shards, packed projections, checkpoints.

Of the runtime it may import `distributed` and `codegen`.
"""
