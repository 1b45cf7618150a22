"""Options that several commands have, declared once.

It may import typer, `autopar.ir`, `autopar.models`, `autopar.planning` and `autopar.presets`.
"""
