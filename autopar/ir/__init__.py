"""The vocabulary that all rooms share: programs, axes, sharding types, degrees, plans, clusters and schedules.

May import `autopar.files` and `autopar.errors` only, and torch inside functions.
"""
