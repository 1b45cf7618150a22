"""Repeated layers: how they are found, exported once and folded into blocks.

It may import what `autopar.capture` may.
"""
