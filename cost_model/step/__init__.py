"""Seconds of a training step of many layouts at once, put together from blocks and data-parallel collectives.

It imports the rooms `machine` and `work`.
"""
