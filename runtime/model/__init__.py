"""`ParallelModel`: one training step, with pipeline stages, ZeRO, tied parameters and other input shapes.

Of the runtime it may import everything but `verify` and `measure`.
"""
