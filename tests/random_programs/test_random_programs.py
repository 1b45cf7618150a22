"""Seeded random programs equal one device under random meshes of up to 8 ranks, with the solver's and random labels."""

import logging
import random
from collections import Counter

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from program_draws import KINDS, draw_source
from program_source import Source
from random_meshes import Checked, check_program, ill_conditioned

NUM_PROGRAMS = 52  # of each kind
Drawn = tuple[Source, int]


def programs(kind: str) -> st.SearchStrategy[Drawn]:
    """A module and the seed of its mesh and labels; a failing one is made smaller and printed as its source."""
    modules = st.randoms(use_true_random=False).map(lambda rng: draw_source(kind, rng))
    return st.tuples(modules, st.integers(0, 999))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second capture at another sequence length may fail, which torch logs at length."""
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_one_device(kind: str) -> None:
    distinct: dict[Source, Checked] = {}

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=3 * NUM_PROGRAMS,
        deadline=None,
        database=None,
        print_blob=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs(kind))
    def every(drawn: Drawn) -> None:
        source, seed = drawn
        if source not in distinct and len(distinct) < NUM_PROGRAMS and not ill_conditioned(source):
            distinct[source] = check_program(source, random.Random(seed))

    every()
    assert len(distinct) == NUM_PROGRAMS
    labellings = Counter[str]()
    for checked in distinct.values():
        labellings.update(equal=checked.equal, refused=checked.refused)
    assert labellings["equal"] > 1.5 * NUM_PROGRAMS, labellings  # most degrees divide what they have to


def test_a_program_is_printed_as_the_source_that_makes_it_again() -> None:
    source = draw_source("sequence", random.Random(0))
    namespace: dict[str, object] = {"__name__": "printed"}
    exec(repr(source), namespace)
    model = namespace["Model"]
    assert isinstance(model, type) and issubclass(model, torch.nn.Module)
    inputs = namespace["inputs"]
    assert isinstance(inputs, dict)
    out = model()(**inputs)
    assert "loss" in out if isinstance(out, dict) else out.dim() == 0
