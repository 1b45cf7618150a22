"""Buffers changed in forward on real ranks: they have the values of the whole batch, and are saved."""

from collections.abc import Callable

import pytest
import torch
from integration_models import recorded_batch, seeded_recorded
from suites import long

from autopar.commands.verify import verify
from autopar.errors import PlanError
from autopar.runtime.distributed.launch import Ranks

RECORDED = "integration_models:recorded"


@pytest.mark.parametrize("wish", [long({"dp": 4, "zero": 3}), {"dp": 2, "tp": 2, "zero": 1}], ids=str)
def test_batch_norm_over_ranks(wish: dict[str, int], four_ranks: Ranks) -> None:
    report = verify(RECORDED, world_size=4, degrees=wish, steps=3, ranks=four_ranks)
    assert report.passed, [(q.name, q.where, q.max_error) for q in report.quantities]
    errors = {q.name: q.scaled_error for q in report.quantities}
    assert errors["buffers changed in forward"] < 1e-12


def test_accumulation_is_refused() -> None:
    with pytest.raises(PlanError, match=r"accumulate = 2 would change the loss: .*(sub|batch)"):
        verify(RECORDED, world_size=2, degrees={"dp": 2, "accumulate": 2})


@pytest.mark.parametrize("zero", [0, 3])
def test_a_loss_outside_and_the_state(zero: int, worlds: Callable[[int], Ranks]) -> None:
    losses, state, scores = worlds(2).run("integration_ranks:recorded_steps", zero)[0]
    model = seeded_recorded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, target = recorded_batch(step)
        loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-13)
    expected = model.state_dict()
    assert state.keys() == expected.keys()  # `offset` is not saved
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=1e-12, atol=1e-14), name
    assert torch.allclose(scores, model.eval()(x), rtol=1e-12)
