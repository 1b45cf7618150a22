"""A recomputed block sends its rows to the experts of its first run, whatever its scores are then."""

import pytest
import torch

from autopar.lowering.experts import KeptChoices, kept_choice


def test_choices_are_those_of_the_first_run() -> None:
    choices, first, second = KeptChoices(), torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    for given in ((first, second), (second, second), (second, first)):
        with choices:
            found = [kept_choice(one) for one in given]
        assert [one.tolist() for one in found] == [first.tolist(), second.tolist()]
    assert kept_choice(second) is second


def test_a_run_that_stops_early_may_be_repeated() -> None:
    choices, first, second = KeptChoices(), torch.tensor([[0]]), torch.tensor([[1]])
    with choices:
        kept_choice(first)
        kept_choice(second)
    with pytest.raises(ValueError, match="enough"), choices:
        kept_choice(second)
        raise ValueError("enough")
    with choices:
        assert [kept_choice(second).item(), kept_choice(first).item()] == [0, 1]


def test_kept_choices_are_packed() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda chosen: chosen.tolist(), torch.tensor):
        choices = KeptChoices()
    for _ in range(2):
        with choices:
            found = kept_choice(torch.tensor([4, 2]))
    assert found.tolist() == [4, 2]
