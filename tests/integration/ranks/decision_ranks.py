"""Functions of ranks in test_decisions: `Ranks.run("decision_ranks:name", ...)`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from data_ranks import message
from deciding_models import Batch, Lengths, PaddedIfNeeded, built, rows_of

from autopar.api import parallelize

KINDS = {"padding": PaddedIfNeeded, "lengths": Lengths}


def outcomes(
    rank: int, world_size: int, wish: Mapping[str, Any], kind: str, batches: Sequence[Batch], method: str
) -> list[tuple[str, float]]:
    """For every global batch the message that a rank got, or the difference of its loss to one device's.

    The first batch has the example inputs.
    """
    reference = built(KINDS[kind])

    def part(batch: Batch, coordinate: int, count: int) -> Batch:
        rows = len(next(iter(batch.values()))) // count
        return rows_of(batch, slice(coordinate * rows, (coordinate + 1) * rows))

    count = int(wish.get("dp", 1))
    example = part(batches[0], rank % count, count)
    parallel = parallelize(built(KINDS[kind]), f"{world_size}xcpu", example_inputs=example, plan=wish, specialise=True)
    coordinate = parallel.rank_mesh.sample_ranks.coordinate if count > 1 else 0
    found = []
    for batch in batches:
        own, losses = part(batch, coordinate, count), list[float]()

        def run(own: Batch = own, losses: list[float] = losses) -> None:
            parallel.train(method != "eval mode")
            if method == "forward_backward":
                losses.append(float(parallel.forward_backward(own)))
            else:
                losses.append(float(parallel.evaluate(own)["loss"]))

        text = message(run)
        with torch.no_grad():
            found.append((text, abs(losses[0] - float(reference(**batch))) if losses else 0.0))
    return found


def loss_under_plan(rank: int, path: str, batch: Batch) -> float:
    """The first loss of a job that loads a plan file, with a batch of one rank."""
    parallel = parallelize(built(PaddedIfNeeded).float(), "2xcpu", example_inputs=batch, plan=path, specialise=True)
    return float(parallel.forward_backward(batch))
