"""Checks that users may run on their own operators and models.

It may import everything but the command line and `autopar.api`.
"""
