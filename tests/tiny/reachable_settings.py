"""A module of settings, as a training script imports one."""

FACTOR = 3
