"""Which candidates have their cuts varied."""

import numpy as np
from search_cases import Case

from autopar.search.driver.optuna_seeds import BEST, starts_of
from autopar.search.space.candidates import candidates

CASE = Case(model="llama", cluster="4xh100", global_batch=16)


def test_the_best_is_varied_however_much_its_own_stages_gain() -> None:
    found = candidates(CASE.constraints.narrowed({"pp": 4, "schedule": "1f1b"}))
    bounds = np.linspace(1.0, 2.0, len(found))
    starts = starts_of(found, bounds, lambda ones: [0.8 * bounds[index] for index in ones], 0, [], {})
    assert (starts[0].index, starts[0].name, starts[0].is_varied) == (0, BEST, True)


def test_without_stages_nothing_is_varied() -> None:
    found = candidates(CASE.constraints.narrowed({"pp": 1}))
    (start,) = starts_of(found, np.ones(len(found)), lambda ones: [1.0] * len(ones), 0, [], {})
    assert not start.is_varied
