"""Every dimension of the search space: listed, fixed, forbidden, refused, shown in text and in a plan, and priced."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.cache.captures import captured_model
from autopar.capture.record.captured import Capture
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import degrees_from
from autopar.ir.device import Link
from autopar.ir.program import Program
from autopar.planning.fixed import PricedStages, label_plan, program_for
from autopar.planning.labels import LABELLED, SearchLabels
from autopar.planning.machine import machine_of
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.pricing.exact import priced
from autopar.search.result.result import degrees_in_plain
from autopar.search.space.candidates import Candidates, Split, candidates
from autopar.search.space.dimensions import BY_COLUMN, BY_WORD, DIMENSIONS, WORDS, Constraints

CONSTRAINTS = Constraints(
    num_devices=24,
    global_batch=48,
    most_stages=10,
    tensor_degrees=(1, 2, 3, 4, 8),
    context_degrees=(1, 2),
    expert_degrees=(1, 2),
    devices_per_host=4,
)
ALL = candidates(CONSTRAINTS)
# values beside which a dimension alone makes the difference
FEW: dict[str, Any] = {"order": {"pp": (2,), "tp": (2,)}, "schedule": {"pp": (2,)}, "virtual_stages": {"pp": (2,)}}

every_dimension = pytest.mark.parametrize("word", WORDS)


def values(found: Candidates, word: str) -> list[Any]:
    dimension = BY_WORD[word]
    column = getattr(found, dimension.column or word)
    return [dimension.value_at(position) for position in column.tolist()]


def test_every_column_is_a_dimension() -> None:
    assert {field.name for field in fields(Candidates)} == set(BY_COLUMN)
    assert len(BY_WORD) == len(DIMENSIONS) == len(BY_COLUMN) + 1  # dp is a product of two


@every_dimension
def test_several_values_are_listed(word: str) -> None:
    assert len(set(values(ALL, word))) >= 2
    assert all(BY_WORD[word].problem(word, value) is None for value in values(ALL, word))


@every_dimension
def test_fixed_and_forbidden(word: str) -> None:
    """A fixed value is the only one, a forbidden one is in no candidate. Other candidates stay as they are."""
    texts = {ALL.text(i): value for i, value in enumerate(values(ALL, word))}
    for value in sorted(set(texts.values()), key=str)[:3]:
        fixed = candidates(CONSTRAINTS.narrowed({word: value}))
        assert set(values(fixed, word)) == {value}
        kept = {text for text, own in texts.items() if own == value}
        assert kept <= {fixed.text(i) for i in range(len(fixed))}
        forbidden = candidates(CONSTRAINTS.narrowed(None, {word: value}))
        assert value not in values(forbidden, word)
        assert texts.keys() - kept <= {forbidden.text(i) for i in range(len(forbidden))}


@every_dimension
def test_a_wrong_value_is_refused(word: str) -> None:
    for wrong in (-1, True, 1.5, "none of them", None):
        for kind in ("fix", "forbid"):
            given: Any = {kind: {word: wrong}}
            with pytest.raises(InputError, match=f"{kind} {word}: must be"):
                CONSTRAINTS.narrowed(**given)


@every_dimension
def test_it_goes_into_the_plan(word: str) -> None:
    """The degrees of a candidate have the value, and the words of a plan that state it are the same degrees."""
    expected = values(ALL, word)
    for i in range(0, len(ALL), 41):
        degrees = ALL.degrees(i)
        assert BY_WORD[word].value_of(degrees) == expected[i]
        column = BY_WORD[word].column
        if column is not None:
            position = int(getattr(ALL, column)[i])
            stated = BY_WORD[word].fields_of_degrees(position, has_pipeline=degrees.pp > 1)
            assert all(getattr(degrees_from(stated), name) == getattr(degrees, name) for name in stated)


def test_a_candidate_is_found_by_its_text() -> None:
    for i in range(0, len(ALL), len(ALL) // 7):
        assert ALL.index_of(ALL.text(i)) == i


def test_no_two_candidates_are_the_same() -> None:
    rows = np.stack([getattr(ALL, name) for name in BY_COLUMN], axis=1)
    assert len(np.unique(rows, axis=0)) == len(ALL) > 1000
    assert len(candidates(replace(CONSTRAINTS, num_devices=1, global_batch=1))) == 1


@pytest.fixture(scope="module")
def two_hosts() -> ClusterSpec:
    spec = ClusterSpec.preset("8xh100")
    hosts = replace(spec.groups[0], num_hosts=2, devices_per_host=4)
    return replace(spec, groups=(hosts,), inter_host=Link(bytes_per_s=50e9, latency_s=5e-6, name="network"))


@pytest.fixture(scope="module")
def mixture() -> Capture:
    pytest.importorskip("transformers")
    return captured_model("mixtral-8x7b", folder=None, layers=4, hidden=256, seq_len=64, dtype="bfloat16").capture


@pytest.fixture(scope="module")
def captured() -> Capture:
    pytest.importorskip("transformers")
    return captured_model("llama3-8b", folder=None, layers=4, hidden=256, seq_len=64, dtype="bfloat16").capture


@pytest.fixture(scope="module")
def labels(captured: Capture, two_hosts: ClusterSpec) -> SearchLabels:
    return SearchLabels(program_for(captured, LABELLED), two_hosts)


@pytest.fixture(scope="module")
def labels_of_mixture(mixture: Capture, two_hosts: ClusterSpec) -> SearchLabels:
    def program_of(batch: int) -> Program:
        return program_for(mixture, replace(LABELLED, dp_shard=batch))

    return SearchLabels(program_for(mixture, LABELLED), two_hosts, program_of=program_of)


@every_dimension
def test_it_is_priced(word: str, two_hosts: ClusterSpec, request: pytest.FixtureRequest) -> None:
    """Two values have two exact prices, of time and memory. Both are the figures of `autopar.estimate` for the plan."""
    captured = request.getfixturevalue("mixture" if word == "ep" else "captured")
    labels = request.getfixturevalue("labels_of_mixture" if word == "ep" else "labels")
    constraints = Constraints(
        num_devices=8,
        global_batch=16,
        most_stages=6,
        tensor_degrees=(1, 2),
        context_degrees=(1, 2),
        expert_degrees=(1, 2) if word == "ep" else (1,),
        devices_per_host=4,
        fix=FEW.get(word, {}),
    )
    found = candidates(constraints)
    own, prices = values(found, word), {}
    for value in [*dict.fromkeys(own)][:2]:
        degrees = found.degrees(own.index(value))
        works, machine = labels.works(*Split.of(degrees)), machine_of(two_hosts, None, "bf16", stored_bytes=2)
        on = Machinery(machine=machine)
        price = priced(works, degrees, on)
        shown = degrees_in_plain(price.degrees, price.cuts)
        assert BY_WORD[word].value_of(degrees_from({n: v for n, v in shown.items() if n != "cuts"})) == value
        program = program_for(captured, price.degrees)
        labelled = labels.of(program, price.degrees)
        assert labelled is not None
        stages = PricedStages(price.cuts, works, on)
        plan = label_plan(program, two_hosts, price.degrees, "", searched=stages, labelled=labelled)
        estimated = autopar.estimate(program, two_hosts, plan, precision="bf16")
        assert price.seconds == pytest.approx(estimated.step_s, rel=1e-9)
        assert price.peak_bytes == pytest.approx(estimated.peak_bytes, rel=1e-9)
        prices[value] = price.seconds, price.peak_bytes
    first, second = prices.values()
    assert first != second
