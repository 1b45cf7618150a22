"""The course of a search: branch and bound over candidates, Optuna's variations of stage cuts, and what follows on it.

Imports every other package of the search but `explain` and `labels`.
"""
