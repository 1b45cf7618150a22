"""One profiled training step, as a Chrome trace.

Of the runtime it may import `distributed` and `codegen`.
"""
