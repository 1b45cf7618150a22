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
_HELD = {
    OPTIMIZER: "parameters that the optimizer updates, gradients after the backward pass, its state and its step",
    PARAMETERS: "shards of parameters and of their gradients, the optimizer's state and its step",
    ACTIVATIONS: "tensors that repeated blocks save for the backward pass",
}
HELD = {offload: "; ".join(_HELD[part] for part in offload.split("+") if part in _HELD) for offload in OFFLOADS}


def parts_of_offload(offload: str) -> frozenset[str]:
    """The parts of a value of `OFFLOADS` that are on the host."""
    return frozenset() if offload == NO_OFFLOAD else frozenset(offload.split("+"))


def offload_in_words(offload: str) -> str:
    """What is on the host, in words."""
    return f"{' and '.join(offload.split('+'))} on the host"
