"""Rewrites of an exported graph, one per file, until it holds functional operators with one output each.

It may import what `autopar.capture` may.
"""
