"""The least cost of a network: elimination against every combination of choices, and against the integer program on
drawn networks and on models."""

import random
from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest
from integer_program import solved
from label_cases import program_of
from suites import long

from autopar.cache.captures import captured_model
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.planning.fixed import choose_labels, program_for
from autopar.planning.labels import LABELLED
from autopar.search.labels import elimination
from autopar.search.labels.elimination import eliminated, elimination_order
from autopar.search.labels.neighbourhoods import improved
from autopar.search.labels.network import Network, NetworkValue, Use

KINDS = 4  # of types in a drawn network


def cost_of(network: Network, choices: tuple[int, ...]) -> float:
    """The cost of any choices, infinite where there is no conversion that they want."""
    total = float(sum(costs[k] for costs, k in zip(network.costs, choices, strict=True)))
    for value in network.values:
        made = value.made[choices[value.source]]
        wanted = {int(use.wanted[choices[use.variable]]) for use in value.uses}
        kept = {int(use.wanted[choices[use.variable]]) for use in value.uses if use.kept}
        forms = {int(value.forms[t]) for t in kept if not value.regathered[made, t]}
        total += float(sum(value.convert[made, t] for t in wanted if t != made))
        total += float(sum(value.keep[form] for form in forms))
    return total


def drawn(seed: int, num_variables: int = 6, most_choices: int = 4) -> Network:
    """Values between variables that come later; some conversions are missing, some uses kept, one variable uses a
    value twice."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, most_choices) for _ in range(num_variables)]

    def types(variable: int) -> np.ndarray:
        return np.array([rng.randrange(KINDS) for _ in range(sizes[variable])], dtype=np.intp)

    values = []
    for source in range(num_variables - 1):
        users = rng.choices(range(source + 1, num_variables), k=rng.randint(1, 4))
        convert = np.array([[rng.choice((np.inf, rng.random(), 2.0)) for _ in range(KINDS)] for _ in range(KINDS)])
        np.fill_diagonal(convert, 0.0)
        regathered = np.array([[rng.random() < 0.2 for _ in range(KINDS)] for _ in range(KINDS)])
        np.fill_diagonal(regathered, False)
        values.append(
            NetworkValue(
                source=source,
                made=types(source),
                uses=tuple(Use(variable=v, wanted=types(v), kept=rng.random() < 0.5) for v in users),
                convert=convert,
                forms=np.array([0, 0, 2, 3]),
                keep=np.array([rng.random() for _ in range(KINDS)]),
                regathered=regathered,
            )
        )
    costs = tuple(np.array([rng.random() for _ in range(size)]) for size in sizes)
    return Network(costs=costs, values=tuple(values))


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "taken apart"])
@pytest.mark.parametrize("seed", range(40))
def test_no_combination_is_cheaper(seed: int, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if apart:
        monkeypatch.setattr(elimination, "LARGEST_OF_A_VALUE", 4)
    network = drawn(seed)
    every = product(*(range(len(costs)) for costs in network.costs))
    least = min(cost_of(network, choices) for choices in every)
    found = eliminated(network)
    assert found is not None
    assert found.gap == 0.0
    if least == np.inf:
        assert found.objective == np.inf
    else:
        assert found.objective == pytest.approx(least, rel=1e-12)
        assert cost_of(network, found.choices) == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("seed", range(40, 70))
def test_the_integer_program_finds_the_same_cost(seed: int) -> None:
    network = drawn(seed, num_variables=12, most_choices=6)
    found, other = eliminated(network), solved(network)
    assert found is not None
    if other is None:
        assert found.objective == np.inf
    else:
        assert found.objective == pytest.approx(other.objective, abs=1e-6)
        assert cost_of(network, other.choices) >= found.objective - 1e-9


def test_some_drawn_networks_have_choices_and_some_none() -> None:
    least = [found.objective for seed in range(40) if (found := eliminated(drawn(seed))) is not None]
    assert {np.isfinite(each) for each in least} == {True, False}


def plain(source: int, users: Iterable[int], keep: list[float], *, kept: bool) -> NetworkValue:
    """A value whose conversions cost 1; every choice of a variable makes or wants a type of its own."""
    types, count = np.arange(len(keep), dtype=np.intp), len(keep)
    return NetworkValue(
        source=source, made=types, uses=tuple(Use(variable=v, wanted=types, kept=kept) for v in users),
        convert=1.0 - np.eye(count), forms=types, keep=np.array(keep), regathered=np.zeros((count, count), np.bool_),
    )  # fmt: skip


def test_many_uses_are_taken_apart() -> None:
    """A value with so many users that no table over all of them could be held."""
    value = plain(0, range(1, 60), [3.0, 2.0, 1.0], kept=True)
    found = eliminated(Network(costs=(np.ones(3),) * 60, values=(value,)))
    assert found is not None
    assert found.objective == pytest.approx(60 + 1)
    assert set(found.choices) == {2}


def every_two_share_a_value(num_variables: int) -> Network:
    numbers = range(num_variables)
    values = tuple(plain(a, [b], [0.0] * 4, kept=False) for a in numbers for b in numbers[a + 1 :])
    return Network(costs=(np.arange(4.0)[::-1],) * num_variables, values=values)


def test_a_network_whose_tables_are_too_large_is_left_to_neighbourhoods() -> None:
    network = every_two_share_a_value(26)
    assert eliminated(network) is None
    for found in (improved(network), solved(network)):
        assert found is not None
        assert found.choices == (3,) * 26
        assert found.objective == pytest.approx(0.0, abs=1e-6)


def test_neighbourhoods_find_choices_near_the_least_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables keep several of the twelve variables in every round. A third of the conversions are missing."""
    monkeypatch.setattr(elimination, "LARGEST_BITS", 6.0)
    num_found = num_legal = 0
    for seed in range(40, 100):
        network = drawn(seed, num_variables=12, most_choices=6)
        least, found = eliminated(network), improved(network)
        assert least is not None
        num_legal += least.objective < np.inf
        if found is not None:
            num_found += 1
            assert found.gap is None
            assert cost_of(network, found.choices) == pytest.approx(found.objective, rel=1e-12)
            assert least.objective * (1 - 1e-12) <= found.objective <= 1.3 * least.objective
    assert num_legal == 25
    assert num_found >= 20


def test_no_table_beside_the_kept_variables_is_large() -> None:
    scopes = [(a, b) for a in range(20) for b in range(a)]
    order, kept, _ = elimination_order([4] * 20, scopes, [1.0] * 20)
    assert sorted([*order, *kept]) == list(range(20))
    assert len(order) == 7  # 4 ** 7 entries are 2 ** 14
    _, others, _ = elimination_order([4] * 20, scopes, [0.1 if v in kept else 1.0 for v in range(20)])
    assert others > set(range(20)) - kept


def test_the_smallest_table_first() -> None:
    """A chain: 3 × 4 and 2 × 8 entries from its ends, then 8 × 3, then the last variable's own."""
    order, _, entries = elimination_order([2, 8, 3, 4], [(0, 1), (1, 2), (2, 3)])
    assert order == [3, 0, 1, 2]
    assert entries == pytest.approx(12 + 16 + 24 + 3)


@pytest.mark.parametrize("degrees", [Degrees(tp=2), Degrees(tp=4, dp_shard=2), Degrees(tp=8)], ids=str)
@pytest.mark.parametrize("model", ["llama", "gpt2", long("mixtral")])
def test_models_are_labelled_as_by_the_integer_program(
    model: str, degrees: Degrees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama's key heads make two mesh dimensions of 8 ranks."""
    program, cluster = the_program(model), ClusterSpec.preset("8xh100")

    _, _, found = choose_labels(program, cluster, degrees)
    monkeypatch.setattr("autopar.search.labels.costs.eliminated", lambda _: None)
    _, _, near = choose_labels(program, cluster, degrees)
    assert near.gap is None
    for name, objective in found.objective.items():
        assert objective * (1 - 1e-9) <= near.objective[name] <= objective * 1.01
    monkeypatch.setattr("autopar.search.labels.costs.improved", solved)
    _, _, other = choose_labels(program, cluster, degrees)
    assert found.gap == 0.0
    assert other.gap is not None
    assert other.gap < 1e-6
    assert found.objective == pytest.approx(other.objective, rel=1e-6)
    assert found.blocks == other.blocks


def the_program(model: str) -> Program:
    if model != "mixtral":
        return program_of(model)
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "seq_len": 16, "dtype": "bfloat16"}
    return program_for(captured_model("mixtral-8x7b", folder=None, **sizes).capture, LABELLED)
