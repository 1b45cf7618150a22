"""One process of a shared study: prices variations by a formula and writes what it priced, one line each."""

import sys
import time
from typing import Any, cast

from autopar.search.refine import Refined, Start, refine
from autopar.search.study import study_place

QUESTION = {"model": "formula", "global_batch": 8}
STARTS = [Start(index=0, text="slow", name="FSDP"), Start(index=1, text="fast"), Start(index=2, text="unfit")]
CAPACITY = 100.0


class Formula:
    """What `refine` reads of a price."""

    def __init__(self, index: int, moved: tuple[int, int]) -> None:
        self.seconds = (2.0, 1.0, 0.5)[index] + 0.1 * abs(moved[0] - 1) + 0.1 * abs(moved[1] + 1)
        self.needed_bytes = CAPACITY + (10.0 if index == 2 else -10.0)


def refined(where: str, trials: int, seed: int, asked: list[str], wait_s: float = 0.0) -> Refined:
    """Refine, noting in `asked` what was priced."""

    def price(index: int, moved: tuple[int, int]) -> Any:
        asked.append(f"{index} {moved[0]} {moved[1]}")
        time.sleep(wait_s)
        return cast(Any, Formula(index, moved))

    place = study_place(where, QUESTION)
    return refine(STARTS, price, trials=trials, capacity_bytes=CAPACITY, seed=seed, place=place)


if __name__ == "__main__":
    priced: list[str] = []
    found = refined(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), priced, wait_s=0.01)
    print("\n".join(priced))
    print("best", cast(Any, found.best).seconds)
