"""Process groups, local ranks, and reports of hanging ranks.

It may import `autopar.ir`, and no other room of the runtime.
"""
