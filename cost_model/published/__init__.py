"""Published training runs: their rows, their predictions, and how far predictions are from measurements.

It imports the rooms `memory`, `step`, `work` and `machine`.
"""
