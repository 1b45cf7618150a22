"""Pipeline stages that all take the same seconds."""

from autopar.cost_model.pipeline.simulator import StageSeconds


def equal_stages(
    num_stages: int, *, forward_s: float, backward_s: float, weight_s: float = 0.0, message_s: float = 0.0
) -> StageSeconds:
    """Equal stages; the seconds are of one stage, W is a part of B."""
    return StageSeconds(
        forward_s=[forward_s] * num_stages,
        backward_s=[backward_s] * num_stages,
        input_s=[backward_s - weight_s] * num_stages,
        weight_s=[weight_s] * num_stages,
        forward_message_s=[message_s] * (num_stages - 1),
        backward_message_s=[message_s] * (num_stages - 1),
    )
