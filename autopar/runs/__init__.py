"""The directory of a training run: its two files, and what they say of the run. Nothing here imports torch.

May import `autopar.files` and `autopar.errors` only.
"""
