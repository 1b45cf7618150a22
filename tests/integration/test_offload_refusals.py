"""What offload and steps in the backward pass refuse, in this process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import PlanError, RuntimeInputError
from autopar.ir.degrees import degrees_from
from autopar.ir.offload import OFFLOADS
from autopar.planning.degrees import resolve_degrees

pytestmark = pytest.mark.usefixtures("own_world")
BATCH = (torch.randn(4, 8), torch.arange(4))


@pytest.fixture(scope="module")
def own_world() -> Iterator[None]:
    """The process group of this process ends with these tests."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def parallel(**wish: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
    loss_fn = torch.nn.functional.cross_entropy
    return autopar.parallelize(model, "1xcpu", example_inputs=BATCH, plan={"dp": 1, **wish}, loss_fn=loss_fn)


def test_unknown_values_are_refused() -> None:
    with pytest.raises(PlanError, match=r"offload: must be one of none, optimizer, parameters"):
        degrees_from({"offload": "disk"})


def test_shards_on_the_host_need_shards() -> None:
    with pytest.raises(PlanError, match=r"(?s)zero 0 has no shards.*use zero 3, or offload optimizer"):
        resolve_degrees({"dp": 2, "zero": 0, "offload": "parameters"}, 2)
    assert resolve_degrees({"dp": 1, "zero": 0, "offload": "parameters"}, 1).fsdp_stage == 3


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_plain_loop_has_equal_bits(offload: str) -> None:
    """`parallel(...)` and `backward()`, two losses before a step, a step that changes `.data`, and `evaluate`."""
    found = []
    for value in (OFFLOADS[0], offload):
        model = parallel(offload=value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            (model(*BATCH) + model(BATCH[0] * 2, BATCH[1])).backward()
            model(BATCH[0] / 2, BATCH[1]).backward()  # adds to the gradients
            optimizer.step()
            optimizer.zero_grad()
        next(iter(model.parameters())).data.mul_(2)
        with torch.no_grad():
            found.append([*(p.detach().clone() for p in model.parameters()), model.evaluate(BATCH)["loss"]])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("offload", OFFLOADS[1:])
def test_weights_are_read_in_place(offload: str) -> None:
    """A state dict, as a checkpoint has it, and the optimizer's state."""
    source, model = parallel(), parallel(offload=offload)
    own = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (source, model)]
    for one, optimizer in zip((source, model), own, strict=True):
        one.forward_backward(BATCH)
        optimizer.step()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    model.load_state_dict(source.state_dict())
    assert torch.equal(source.evaluate(BATCH)["loss"], model.evaluate(BATCH)["loss"])
    states = [one.optimizer_state_dict(optimizer) for one, optimizer in zip((source, model), own, strict=True)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(whole(one), whole(states[1][name])) for name, one in states[0].items())


def whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def test_a_change_between_forward_and_backward_raises_as_on_one_device() -> None:
    model = parallel(offload="optimizer")
    loss = model(*BATCH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model(*BATCH)  # brings the new values to the device
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_clipping_and_whole_matrices_do_not_step_in_the_backward_pass() -> None:
    model = parallel(offload="optimizer")
    with pytest.raises(RuntimeInputError, match="LBFGS cannot step in the backward pass"):
        model.step_in_backward(torch.optim.LBFGS)
    made = parallel(offload="optimizer")
    made.step_in_backward(lambda own: torch.optim.SGD(own, lr=0.1))
    with pytest.raises(RuntimeInputError, match="already"):
        made.step_in_backward(lambda own: torch.optim.SGD(own, lr=0.1))
    made.forward_backward(BATCH)
    with pytest.raises(RuntimeInputError, match="before all gradients were there to be clipped"):
        made.clip_grad_norm_(1.0)


def test_compiled_blocks_save_on_the_host() -> None:
    losses = []
    for offload in ("none", "activations", "parameters+activations"):
        model = parallel(offload=offload)
        model.compile(backend="aot_eager")
        before = model.copies.bytes_to_host
        losses.append(float(model.forward_backward(BATCH)))
        assert (model.copies.bytes_to_host > before) == (offload != "none")
    assert losses == [losses[0]] * 3
