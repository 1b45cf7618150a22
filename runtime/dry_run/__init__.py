"""A plan's own generated program, run by the runtime on tensors without values: its saved tensors, its memory."""
