"""The directory of a training run, written by the ranks.

Of the runtime it may import `model` and all below.
"""
