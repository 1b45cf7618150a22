"""Pipeline stages: closed forms of schedules, the simulator of action lists, and a plan's own stages.

It imports the rooms `step`, `work` and `machine`.
"""
