"""The only modules that import torch's private names.

It may import torch, and nothing else of autopar.
"""
