"""The choice of `Plan.regather`: values gathered for products are gathered again for the backward pass, or kept for it.

Candidates are searched as if they gathered again. With kept values, the same labels send less and hold more. A backward
pass that gathers a value again also sums its gradient, which takes as long. So a step saves at most half of its time.
Candidates that can gain so much are screened with kept values. They are priced from the smallest bound on. At the end
no bound is below the best, so no candidate is better under either setting.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from autopar.search.driver.optuna_refine import MOVES
from autopar.search.driver.optuna_seeds import NEARLY
from autopar.search.driver.search import Exploration, SearchState, Works, explored_again
from autopar.search.pricing.exact import AS_IT_IS, Cut

MOST_SAVED = 0.5  # of a step
MOST_VARIED = 4  # candidates whose cuts are moved


def with_kept(
    search: SearchState, works_kept: Works, *, most_exact: int, should_continue: Callable[[], bool] = lambda: True
) -> SearchState:
    """The search's result with the best plan that keeps gathered values, and with a bound of both kinds."""
    if search.proof.best is None or search.best is None or search.goal.is_memory:
        return search
    c, least, old = search.candidates, search.goal.value(search.best), search.proof
    can_gain = (search.values * (1 - MOST_SAVED) < least) & (c.tp * c.cp * c.ep > 1)
    kept, proof = explored_again(search, works_kept, can_gain, least, most_exact, should_continue)
    _price_moved(search, kept)
    both = replace(old, bound=min(old.bound, proof.bound), is_proven=old.is_proven and proof.is_proven)
    return replace(search, kept=kept.best, proof=both)


def _price_moved(search: SearchState, kept: Exploration) -> None:
    """Price the varied cuts of the best plan and, if the search has trials, of the few nearly best candidates."""
    c, goal, best = search.candidates, search.goal, replace(search, chunked=None).best
    moved = [varied for varied, plan in search.together.found.items() if varied[1] != AS_IT_IS and plan is best]
    near = [
        (goal.value(plan), index)
        for (index, _), plan in kept.together.found.items()
        if plan.fits and c.pp[index] > 1 and goal.value(plan) < kept.below * (1 + NEARLY)
    ]
    if search.refined.trials:
        cuts = [Cut(first, last, by_stage=True) for first, last in product(MOVES, MOVES)]
        moved += [(index, cut) for _, index in sorted(near)[:MOST_VARIED] for cut in cuts]
    kept.together.price([varied for varied in moved if c.split(varied[0]) in kept.works])
