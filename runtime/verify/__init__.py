"""`autopar verify`: the same seeded steps on one device and in parallel, and the measure of their difference.

It may import every other room of the runtime.
"""
