"""All ranks in one process, as PyTorch's `LocalTensor`s. `private` imports this module only to run ranks.

This module needs `torch.distributed.tensor`, whose import takes as long as the import of torch.
"""

from functools import cache
from typing import Any

import torch

from autopar._torch.names import private_names

with private_names():
    from torch._ops import OpOverload
    from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode


class LocalRanks(LocalTensorMode):
    """`LocalTensorMode` with a short path for ATen operators that draw no random numbers: one call per rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "autopar") or not _only_per_rank(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        named = kwargs or {}
        if not types and args and isinstance(args[0], torch.Tensor):
            return func(*args, **named)  # equal on all ranks
        if LocalTensor not in types:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.sym_size.default:
            return tuple(args[0]._size)
        results = {
            rank: func(*_of_rank(args, rank), **{key: _of_rank(value, rank) for key, value in named.items()})
            for rank in sorted(self.ranks)
        }
        return args[0] if func._schema.is_mutable else _over_ranks(results)


@cache
def _only_per_rank(func: OpOverload) -> bool:
    """Whether an operator can run once per rank: it draws nothing, and writes at most its first operand."""
    if {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(func.tags):
        return False
    schema = func._schema
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    return not any(written) or (written[0] and sum(written) == 1 and len(schema.returns) == 1)


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, LocalTensor):
        return value._local_tensors[rank]
    if isinstance(value, torch.SymInt) and isinstance(value.node, LocalIntNode):
        return value.node._local_ints[rank]  # a size that differs between ranks
    return type(value)(_of_rank(v, rank) for v in value) if type(value) in (list, tuple) else value


def _over_ranks(results: dict[int, Any]) -> Any:
    """One result for all ranks. Tensors become a rank tensor; other values must be equal on all ranks."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        return LocalTensor(results)
    if isinstance(first, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in first):
        return type(first)(_over_ranks({rank: v[i] for rank, v in results.items()}) for i in range(len(first)))
    assert all(v == first for v in results.values()), results
    return first
