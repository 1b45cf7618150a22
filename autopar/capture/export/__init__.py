"""Runs `torch.export` on an unmodified model and returns one flat graph.

It may import `autopar.capture.passes` and the modules below it, `autopar.ir`, `autopar._torch` and `autopar.errors`.
"""
