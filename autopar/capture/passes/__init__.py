"""Rewrites of a captured graph, one concern per file. `autopar.capture.passes.normalize` has their order.

It may import `autopar.capture.flat_graph`, `autopar.capture.nodes`, `autopar.rules`, `autopar.ir`, `autopar._torch` and
`autopar.errors`.
"""
