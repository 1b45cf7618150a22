"""The only modules that import torch's private names.

It may import torch, and of autopar the errors only.
"""
