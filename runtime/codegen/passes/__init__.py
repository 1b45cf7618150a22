"""Rewrites of graphs that change no collective: evaluation, and dropout switched off.

It imports `autopar.ir` and `autopar.rules`.
"""
