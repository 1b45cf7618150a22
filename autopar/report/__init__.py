"""Words, tables and HTML pages that explain a plan or a search.

It may import every package but `autopar.cli`, `autopar.commands`, `autopar.planning` and `autopar.runtime`.
"""
