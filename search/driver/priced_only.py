"""Plans that autopar prices and does not run yet: expert parallelism.

Only a user's request starts this search. Every degree is a search of its own over the space of plans
(`autopar.search.driver.search`), with the same screening, bounds and exact prices. The best plan names its features
that are formulas only (`autopar.cost_model.estimate.formula_only`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_model.estimate import formula_only
from autopar.cost_model.pricing import Question
from autopar.cost_model.step.experts import expert_assumptions
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.search.bounds.lower_bounds import Beyond, Machinery
from autopar.search.driver.search import Works, search_degrees
from autopar.search.pricing.exact import Priced
from autopar.search.pricing.objective import Goal, Part, parts_of
from autopar.search.result.result import Contender, SearchResult, degrees_in_plain
from autopar.search.space.constraints import Constraints
from autopar.search.space.dimensions import divisors


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """The best plan that autopar does not run, and a bound of all such plans. `machinery` priced it."""

    best: Priced
    value: float
    bound: float
    machinery: Machinery

    @property
    def beyond(self) -> Beyond:
        return self.machinery.beyond

    def formula_only(self, cluster: ClusterSpec) -> tuple[str, ...]:
        """The features of the plan that autopar prices and does not run."""
        on, beyond = self.machinery, self.beyond
        question = Question(cluster=cluster, degrees=self.best.degrees, engine=on.machine.engine, ep=beyond.ep)
        return formula_only(question)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of the plan's price beyond the search's own."""
        return expert_assumptions(self.machinery.machine, self.beyond.ep)


def search_beyond(
    works_of: Works,
    cluster: ClusterSpec,
    constraints: Constraints,
    goal: Goal,
    most_exact: int,
    *,
    should_continue: Callable[[], bool] = lambda: True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Found | None:
    """The best plan on the whole cluster with at least one such feature. None if no such plan fits."""
    part, best, bound = goal.parts[cluster.num_devices], None, np.inf
    for beyond in combinations(works_of(1), cluster):
        if not should_continue():
            return best if best is None else replace(best, bound=0.0)
        on_progress(f"what if: {words_of(beyond)}")
        on, own = machinery_of(part.on, beyond), constraints_of(constraints, cluster)
        parts = {own.num_devices: Part(cluster=cluster, on=on, weight=part.weight)}
        try:
            found = search_degrees(
                works_of, cluster, own, on, most_exact=most_exact, should_continue=should_continue,
                goal=replace(goal, parts=parts), below=np.inf if best is None else best.value,
            )  # fmt: skip
        except AutoparError:  # no labels
            continue
        bound = min(bound, found.proof.bound)  # the search skips values that are not below the best
        if found.best is not None:
            value = replace(goal, parts=parts).value(found.best)
            if best is None or value < best.value:
                best = Found(best=found.best, value=value, bound=bound, machinery=on)
    return best if best is None else replace(best, bound=min(bound, best.value))


def with_beyond(result: SearchResult, found: Found, best: Priced | None, cluster: ClusterSpec) -> SearchResult:
    """The result with the plan that autopar does not run, and with the assumptions of its price."""
    assumptions = (*result.assumptions, *found.assumptions)
    return replace(result, beyond=contender_of(found, best, cluster), assumptions=assumptions)


def contender_of(found: Found, best: Priced | None, cluster: ClusterSpec) -> Contender:
    """The plan that autopar does not run, compared with the best plan that it runs."""
    one, beyond = found.best, found.beyond
    degrees = degrees_in_plain(one.degrees, one.cuts, regather=one.regather)
    degrees |= {"ep": beyond.ep}
    return Contender(
        degrees=degrees,
        step_s=one.seconds,
        needed_bytes=one.needed_bytes,
        fits=one.fits,
        slower=0.0 if best is None else one.seconds / best.seconds - 1,
        reason="autopar does not run it",
        parts=parts_of(one.step.parts),
        value=found.value,
        num_devices=one.degrees.world_size,
        formula_only=found.formula_only(cluster),
    )


def combinations(works: ProgramWorks, cluster: ClusterSpec) -> Iterator[Beyond]:
    """All allowed degrees of ep above 1."""
    experts = [n for n in divisors(cluster.num_devices) if works.num_experts and works.num_experts % n == 0]
    yield from (Beyond(ep=ep) for ep in experts if ep > 1)


def machinery_of(on: Machinery, beyond: Beyond) -> Machinery:
    """The same machinery with the features of `beyond`."""
    return replace(on, beyond=beyond)


def constraints_of(constraints: Constraints, cluster: ClusterSpec) -> Constraints:
    """The constraints of a search beside expert ranks. Ranks lie in the default order."""
    degrees = tuple(tp for tp in constraints.tensor_degrees if cluster.num_devices % tp == 0)
    return replace(constraints, fewer_devices=(), tensor_degrees=degrees, devices_per_host=None)


def words_of(beyond: Beyond) -> str:
    return f"ep {beyond.ep}"
