"""The parts of a step by their short names: seconds of computation, of collectives and others, and bytes of memory.

Reports show the words of a part. A stored result has the short names and is read without the cost model.
"""

COMPUTE = {
    "products": "matrix products",
    "attention": "attention",
    "memory-bound": "memory-bound operators",
    "host": "waiting for the host",
    "expert counts": "waiting for counts of experts",
    "recomputation": "recomputation",
    "embedding, head, loss": "embedding, head and loss",
}
COLLECTIVES = {
    "tensor collectives": ("tp", "activations and their gradients"),
    "context collectives": ("cp", "keys and values"),
    "expert collectives": ("ep", "tokens to their experts and back"),
    "shard collectives": ("dp", "weights and gradients of blocks (ZeRO 2, 3)"),
    "data collectives": ("dp", "gradients and updated parameters"),
    "messages": ("pp", "activations and gradients between stages"),
}
OTHER = {
    "bubble": "bubble of the pipeline",
    "gradient accumulation": "adding up gradients of micro-batches",
    "optimizer": "optimizer",
    "fixed": "fixed costs of a step",
    "stragglers": "waiting for the slowest rank",
}
MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer state",
    "gathered": "gathered weights (ZeRO 3)",
    "activations": "activations in flight",
    "logits": "logits",
    "workspace": "workspace of recomputation",
    "cache": "cache of the allocator",
    "reserve": "reserve of the framework",
}
