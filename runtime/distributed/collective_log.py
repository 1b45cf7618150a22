"""The collectives of a step, in order: every communicating operator with its process group and bytes.

On the host, torch's profiler does not name the process group of an operator. So one step logs the groups, and the
profile of the next step, which runs without the log, is read with it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autopar._torch import private

_NAMESPACES = ("c10d", "_c10d_functional")
_KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}  # the first that a name begins with, its underscores left out


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCollective:
    """One operator of this rank: its name, the name of its process group, and bytes of all operands and results."""

    operator: str
    group: str | None
    num_ranks: int
    input_bytes: int
    output_bytes: int


def kind_of(operator: str) -> str | None:
    """What kind of collective an operator is; None for messages between two ranks."""
    name = operator.rpartition("::")[2].replace("_", "").lower()
    return next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), None)


@contextmanager
def log_collectives() -> Iterator[list[LoggedCollective]]:
    """The list of what is sent inside this context, by backward passes too."""
    log: list[LoggedCollective] = []

    def seen(name: str, arguments: Mapping[str, Any], result: Any) -> None:
        if "wait_tensor" in name:
            return
        group = private.group_name_of(dict(arguments))
        size = 1 if group is None else private.size_of_group(group)
        # operators of c10d are given where to write; what they return are those tensors again
        outputs = [v for k, v in arguments.items() if k.startswith("output")] or [result]
        inputs = [v for k, v in arguments.items() if not k.startswith("output")]
        log.append(
            LoggedCollective(
                operator=name,
                group=group,
                num_ranks=size,
                input_bytes=sum(map(_bytes, inputs)),
                output_bytes=sum(map(_bytes, outputs)),
            )
        )

    with private.watch_operators(_NAMESPACES, seen):
        yield log


def _bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in a list."""
    return sum(t.nbytes for t in private.pytree.tree_leaves(value) if isinstance(t, torch.Tensor))
