"""The labeller: how every operator is split on every mesh dimension, solved as an integer program or by elimination.

Imports `autopar.capture`, `autopar.rules` and the cost model, and no other package of the search.
"""
