"""Models by name, config or factory, built without memory, and inputs for one training step of them.

It may import `autopar.presets`, `autopar.errors`, torch and transformers.
"""
