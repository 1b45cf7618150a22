"""Functions of ranks in test_decisions: `Ranks.run("decision_ranks:name", ...)`."""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from data_ranks import gradient_error, message
from deciding_models import Batch, Checked, Full, Lengths, MaskedAutoencoder, PaddedIfNeeded, built, rows_of

from autopar.api import parallelize

KINDS = {"padding": PaddedIfNeeded, "lengths": Lengths, "full": Full, "patches": MaskedAutoencoder, "checks": Checked}


class Lines(logging.Handler):
    """The lines of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def outcomes(
    rank: int,
    world_size: int,
    wish: Mapping[str, Any],
    kind: str,
    batches: Sequence[Batch],
    method: str = "forward_backward",
    specialise: bool = True,
) -> list[tuple[str, float, str]]:
    """For every global batch the message that a rank got, the error of loss and gradients, and rank 0's log.

    The first batch has the example inputs. The weights move after every step.
    """
    reference, lines = built(KINDS[kind]), Lines()
    count = int(wish.get("dp", 1))

    def part(batch: Batch, coordinate: int) -> Batch:
        rows = len(next(iter(batch.values()))) // count
        return rows_of(batch, slice(coordinate * rows, (coordinate + 1) * rows))

    example = part(batches[0], rank % count)
    parallel = parallelize(
        copy.deepcopy(reference), f"{world_size}xcpu", example_inputs=example, plan=wish, specialise=specialise
    )
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (parallel, reference)]
    coordinate, found = parallel.rank_mesh.sample_ranks.coordinate if count > 1 else 0, []
    logger = logging.getLogger("autopar")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    for batch in batches:
        lines.lines.clear()
        own, losses = part(batch, coordinate), list[float]()

        def run(own: Batch = own, losses: list[float] = losses) -> None:
            parallel.train(method != "eval mode")
            if method == "forward_backward":
                losses.append(float(parallel.forward_backward(own)))
            else:
                losses.append(float(parallel.evaluate(own)["loss"]))

        text, error = message(run), 0.0
        if losses:
            loss = reference(**batch)
            error = abs(losses[0] - float(loss)) / abs(float(loss))
            if method == "forward_backward":
                loss.backward()
                error = max(error, gradient_error(parallel, reference))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append((text, error, "; ".join(lines.lines)))
    logger.removeHandler(lines)
    return found


def loss_under_plan(rank: int, path: str, batch: Batch) -> float:
    """The first loss of a job that loads a plan file, with a batch of one rank."""
    parallel = parallelize(built(PaddedIfNeeded).float(), "2xcpu", example_inputs=batch, plan=path, specialise=True)
    return float(parallel.forward_backward(batch))
