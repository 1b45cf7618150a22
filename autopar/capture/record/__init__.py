"""A capture as a file: its schema, how it is written, and how it is read strictly.

It may import what `autopar.capture` may.
"""
