"""The data of a report about a search: formulas of the best step, the Pareto front, what-if curves.

Imports every other package of the search; nothing of the search imports it.
"""
