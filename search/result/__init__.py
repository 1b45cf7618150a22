"""The result of a search as plain data, and in words.

Imports neither torch nor another package of the search.
"""
