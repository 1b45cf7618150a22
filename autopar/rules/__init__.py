"""How every operator may be split: what a rule is, and the registry of rules.

May import `autopar.ir`, `autopar._torch` and `autopar.errors`; all operator families are in `autopar.rules.families`.
"""
