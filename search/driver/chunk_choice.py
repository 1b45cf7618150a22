"""The choice of `Degrees.loss_chunks`: logits and loss in chunks of tokens, so that the logits never exist whole.

Candidates are searched with whole logits. In chunks, the product of the head is computed once more, and a chunk's
kernels are smaller. A plan in chunks is therefore better only if the free memory makes it fit, or makes it recompute
fewer blocks. So only candidates that recompute or do not fit are screened again: with the largest number of chunks,
with half of it, and so on. Fewer chunks take less time and more memory, so what does not fit is not screened again.
Exact prices come in the order of the bounds, until no bound is below the best. The proof is about all these numbers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.search.driver.branch_and_bound import ROUNDING
from autopar.search.driver.search import SearchState, explored_again, raised_seconds

TOKENS_OF_A_CHUNK = 1024  # of one sequence; fewer rows make the head's product slow
FEWEST, MOST = 4, 64  # of the largest number of chunks that a search tries
LEAST_CHUNKS = 2


class WorksInChunks(Protocol):
    """The block costs under the labels of a split, with the loss in chunks."""

    def __call__(self, tp: int, cp: int = 1, ep: int = 1, *, chunks: int) -> ProgramWorks: ...


def chunks_of(sequence: int | None) -> int:
    """The largest number of chunks that a search tries for sequences of so many tokens: a power of two."""
    most = max(FEWEST, min(MOST, (sequence or 0) // TOKENS_OF_A_CHUNK))
    return 1 << (most.bit_length() - 1)


def with_chunks(
    search: SearchState,
    works_in_chunks: WorksInChunks,
    chunks: int,
    *,
    most_exact: int,
    should_continue: Callable[[], bool] = lambda: True,
) -> SearchState:
    """The search's result with the best plan whose loss runs in chunks, if it is better, and with a bound of both."""
    best, proof = None, search.proof
    least = np.inf if search.best is None else search.goal.value(search.best)
    fits = np.ones(len(search.candidates), dtype=bool)
    while chunks >= LEAST_CHUNKS and np.any(can_gain := fits & _can_gain(search, least)):
        works_of = partial(works_in_chunks, chunks=chunks)
        costs, chunked = explored_again(search, works_of, can_gain, least, most_exact, should_continue)
        if (better := costs.best) is not None:
            best = replace(better, degrees=replace(better.degrees, loss_chunks=chunks))
            least = search.goal.value(best)
        bound = min(proof.bound, chunked.bound, least)
        proof = replace(proof, bound=bound, is_proven=proof.is_proven and chunked.is_proven)
        # what needs too much memory needs more in fewer chunks
        fits = np.isfinite(costs.bounds if search.goal.is_memory else costs.columns["seconds"])
        chunks //= 2
    if np.isfinite(least) and proof.bound >= least * (1 - ROUNDING):  # bounds of the searches before rule out the rest
        proof = replace(proof, is_proven=True)
    return replace(search, chunked=best, proof=proof)


def _can_gain(search: SearchState, least: float) -> NDArray[np.bool_]:
    """Candidates that recompute or do not fit, and whose pipeline and least step are faster than the best plan."""
    c, screened, goal = search.candidates, search.screened, search.goal
    if goal.is_memory:
        return np.ones(len(c), dtype=bool)
    gains = screened.level > 0
    for index, plan in search.exact.items():
        gains[index] |= not plan.fits or plan.degrees.recompute != "none"
    fastest = replace(screened, seconds=screened.least_seconds, level=np.zeros(len(c)))
    for seconds in (screened.pipeline, raised_seconds(replace(search, screened=fastest))):
        gains &= goal.bounds(c, replace(screened, seconds=seconds)) < least
    return gains
