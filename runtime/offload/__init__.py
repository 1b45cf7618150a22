"""Values in host memory: parameters that an optimizer updates there, its state in files, and its step in the backward
pass.
"""
