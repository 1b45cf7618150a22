"""The directory of a training run: its files, and the figures that they hold. Nothing here imports torch.

May import `autopar.files` and `autopar.errors` only.
"""
