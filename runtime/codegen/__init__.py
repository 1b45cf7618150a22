"""Runs generated code: graphs as modules, random streams, and rewrites for evaluation and verification.

It imports `autopar.lowering` and lower packages, and of the runtime only `distributed`.
"""
