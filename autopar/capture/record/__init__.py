"""Captured programs as plain data: records with formulas for sizes, their files, and programs read from them.

It may import every part of `autopar.capture` except `autopar.capture.any_size`, and `autopar.files`.
"""
