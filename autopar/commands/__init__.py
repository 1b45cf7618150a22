"""What the commands `verify`, `trace`, `calibrate` and `doctor` do, without their options and output.

It may import every package but `autopar.cli`.
"""
