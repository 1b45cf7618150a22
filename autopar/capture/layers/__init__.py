"""Finds equal layers: they are exported once if possible, and folded into distinct blocks.

It may import `autopar.capture.export` and the modules below it, `autopar.ir` and `autopar.errors`.
"""
