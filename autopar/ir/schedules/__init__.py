"""Pipeline schedules: one file for each, which holds every fact about it, and the registry that finds these files.

May import `autopar.ir.arrays` and `autopar.errors`. NumPy is loaded on first use, as listings do without it.
"""
