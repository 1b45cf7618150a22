"""The operator rules, one family of operators in each file; the registry finds every file.

A family may import `autopar.rules`, `autopar.ir`, `autopar._torch` and other families.
"""
