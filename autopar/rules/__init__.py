"""How every operator may be split: rules, their notation, and their registry.

May import `autopar.ir`, `autopar._torch` and `autopar.errors`; all operator families are in `autopar.rules.families`.
"""
