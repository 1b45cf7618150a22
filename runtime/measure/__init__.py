"""Measurements of devices and links for `autopar calibrate`, and the checks of `autopar doctor`.

Of the runtime it may import `distributed` and `codegen`.
"""
