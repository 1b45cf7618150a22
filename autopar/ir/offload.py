"""What a plan keeps in host memory instead of device memory: the values of `Degrees.offload`.

    none          everything is on the device
    optimizer     the parameters that the optimizer updates, its state and its step are on the host; the blocks compute
                  with copies on the device. Gradients go to the host after the backward pass, values come back before
                  the next forward pass
    parameters    FSDP2's `CPUOffloadPolicy`: shards of parameters, their gradients and the optimizer's state are on the
                  host. A gather brings a shard to the device, a sum of gradients takes a shard to the host
    activations   the tensors that repeated blocks save for the backward pass go to the host, and come back in it

`activations` goes with each of the others. `parameters` includes the optimizer.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from autopar.errors import Problem

if TYPE_CHECKING:
    from autopar.ir.degrees import Degrees
    from autopar.ir.program import Program
    from autopar.ir.stages import Stage

OPTIMIZER, PARAMETERS, ACTIVATIONS = "optimizer", "parameters", "activations"
NO_OFFLOAD = "none"
# the least movement first; the search takes the first of two equal plans
OFFLOADS = (
    NO_OFFLOAD,
    OPTIMIZER,
    PARAMETERS,
    ACTIVATIONS,
    f"{OPTIMIZER}+{ACTIVATIONS}",
    f"{PARAMETERS}+{ACTIVATIONS}",
)


def parts_of_offload(offload: str) -> frozenset[str]:
    """The parts of a value of `OFFLOADS` that are on the host.

    >>> sorted(parts_of_offload("optimizer+activations"))
    ['activations', 'optimizer']
    """
    return frozenset() if offload == NO_OFFLOAD else frozenset(offload.split("+"))


def offload_in_words(offload: str) -> str:
    """What is on the host, in words.

    >>> offload_in_words("optimizer+activations")
    'optimizer and activations on the host'
    """
    return f"{' and '.join(offload.split('+'))} on the host"


def offload_problems(degrees: "Degrees") -> list[Problem]:
    """Why the offload of a plan cannot run, with the plan that can."""
    if degrees.offloads(PARAMETERS) and degrees.zero == 0 and degrees.dp > 1:
        own = degrees.offload
        return [
            Problem(
                path="offload",
                value=own,
                rule="moves shards of parameters, and zero 0 has no shards",
                suggestion=f"use zero 3, or offload {own.replace(PARAMETERS, OPTIMIZER)}",
            )
        ]
    return []


def offloaded_calls(program: "Program", degrees: "Degrees", stages: "Sequence[Stage]") -> frozenset[int]:
    """The calls whose saved tensors are on the host: repeated blocks, or all blocks if none repeats."""
    if not degrees.offloads(ACTIVATIONS):
        return frozenset()
    every = [i for stage in stages for i in stage.calls]
    repeated = [i for i in every if len(program.uses_of_block(program.calls[i].block)) > 1]
    return frozenset(repeated or every)


def values_that_stay(program: "Program", calls: Collection[int]) -> frozenset[str]:
    """The values that stay on the device although `calls` save them.

    These are parameters, buffers, constants and inputs, and the results that several calls take, such as a rotary
    table: another block needs them on the device.
    """
    made = {result for call in program.calls for result in call.results}
    takers: dict[str, int] = {}
    for call in program.calls:
        for name in {a for a in call.arguments if isinstance(a, str)}:
            takers[name] = takers.get(name, 0) + 1
    taken = {a for i in calls for a in program.calls[i].arguments if isinstance(a, str)}
    return frozenset(name for name in taken if name not in made or takers[name] > 1)
