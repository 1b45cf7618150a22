"""Samples of a dataset in an order that no plan changes, and the part of every global batch that one rank reads.

Of the runtime it imports nothing.
"""
