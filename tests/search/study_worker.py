"""One of two processes that share a study: it prices variations by a formula, and writes a line for each.

For its first price it waits for the other process, so that neither is done before the other has begun.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from autopar.search.driver.optuna_refine import Refinement, Start, refine
from autopar.search.driver.study import study_place

QUESTION = {"model": "formula", "global_batch": 8}
STARTS = [Start(index=0, text="slow", name="FSDP"), Start(index=1, text="fast"), Start(index=2, text="unfit")]
CAPACITY = 100.0
WAIT_S = 40.0


class Formula:
    """What `refine` reads of a price."""

    def __init__(self, index: int, moved: tuple[int, int]) -> None:
        self.seconds = (2.0, 1.0, 0.5)[index] + 0.1 * abs(moved[0] - 1) + 0.1 * abs(moved[1] + 1)
        self.peak_bytes = CAPACITY + (10.0 if index == 2 else -10.0)


def refined(
    where: str, trials: int, seed: int, asked: list[str], wait: Callable[[int], None] = lambda count: None
) -> Refinement:
    """Refine, noting in `asked` what was priced; `wait` is told how many prices were asked for."""

    def price(index: int, moved: tuple[int, int]) -> Any:
        asked.append(f"{index} {moved[0]} {moved[1]}")
        wait(len(asked))
        return cast(Any, Formula(index, moved))

    place = study_place(where, QUESTION)
    return refine(STARTS, price, trials=trials, capacity_bytes=CAPACITY, seed=seed, place=place)


def wait_for_the_other(count: int) -> None:
    """For the first price until the other process asks for its own, then as long as a price may take."""
    folder, ends = Path(sys.argv[1]).parent, time.monotonic() + WAIT_S
    if count == 1:
        (folder / f"began-{os.getpid()}").touch()
        while len(list(folder.glob("began-*"))) < 2 and time.monotonic() < ends:
            time.sleep(0.005)
    time.sleep(0.01)


if __name__ == "__main__":
    priced: list[str] = []
    found = refined(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), priced, wait_for_the_other)
    print("\n".join(priced))
    print("best", cast(Any, found.best).seconds)
