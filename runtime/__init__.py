"""What ranks run: generated code, sharded parameters, training steps, and checks and measurements of them.

It may import `capture`, `rules`, `lowering` and `ir`, but neither the search nor the cost model.
"""
