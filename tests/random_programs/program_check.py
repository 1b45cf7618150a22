"""All drawn programs of one kind against one device; each kind has a test file of its own, so that they run at once."""

import logging
import random
from collections import Counter
from unittest import mock

import hypothesis
from hypothesis import strategies as st
from program_draws import draw_source
from program_source import Source
from random_meshes import Checked, check_program, ill_conditioned

FEW, MANY = 4, 52  # programs of each kind; the few are the first of the many
LOGGER = "torch._subclasses.fake_tensor"  # tells at length why a capture at another sequence length failed
Drawn = tuple[Source, int]


def check_kind(kind: str, num_programs: int) -> None:
    """Distinct programs of a kind equal one device, each on a drawn mesh and with drawn labels."""
    distinct: dict[Source, Checked] = {}

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=3 * num_programs,
        deadline=None,
        database=None,
        print_blob=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(_programs(kind))
    def every(drawn: Drawn) -> None:
        source, seed = drawn
        if source not in distinct and len(distinct) < num_programs and not ill_conditioned(source):
            distinct[source] = check_program(source, random.Random(seed))

    with mock.patch.object(logging.getLogger(LOGGER), "disabled", True):
        every()
    assert len(distinct) == num_programs
    labellings = Counter[str]()
    for checked in distinct.values():
        labellings.update(equal=checked.equal, refused=checked.refused)
    if num_programs == MANY:  # few programs may by chance have many degrees that divide nothing
        assert labellings["equal"] > 1.5 * num_programs, labellings


def _programs(kind: str) -> st.SearchStrategy[Drawn]:
    """A module and the seed of its mesh and labels; a failing one is made smaller and printed as its source."""
    modules = st.randoms(use_true_random=False).map(lambda rng: draw_source(kind, rng))
    return st.tuples(modules, st.integers(0, 999))
