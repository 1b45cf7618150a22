"""Changes of the unmodified module after `parallelize`: the next step names them, and unread attributes may change."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.optim.swa_utils import AveragedModel

import autopar
from autopar.errors import InputError, RuntimeInputError

Change = Callable[[Any, Any], object]


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Settings:
    def __init__(self) -> None:
        self.weight, self.name = 1.0, "sum"


class Net(nn.Module):
    """Reads its numbers and flags, those of a list, of a dict and of its settings, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 5)
        self.tau, self.smooth, self.scales, self.weights = 1.0, False, [1.0, 2.0], {"main": 1.0}
        self.settings, self.calls, self.epoch = Settings(), 0, 0
        self.register_buffer("heat", torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        logits = self.last(self.drop(self.first(x))) / (self.tau * self.heat)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1 if self.smooth else 0.0)
        return loss * self.settings.weight * self.scales[0] * self.weights["main"]


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(4, 6, generator=generator), "y": torch.randint(5, (4,), generator=generator)}


def made(model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = model or Net()
    parallel = autopar.parallelize(model, "1xcpu", example_inputs=batch(), plan={"dp": 1}, **options)
    parallel.forward_backward(batch())
    return model, parallel


READ: dict[str, Change] = {
    "the model .Net.: attribute 'tau' was 1.0 .* is 0.7 .*parallel.buffer.'tau'.": lambda m, _: setattr(m, "tau", 0.7),
    "attribute 'smooth' was False .* is True": lambda m, _: setattr(m, "smooth", True),
    "attribute 'scales' was": lambda m, _: m.scales.__setitem__(0, 3.0),
    "attribute 'weights' was": lambda m, _: m.weights.update(main=2.0),
    "settings .Settings.: attribute 'weight' was 1.0": lambda m, _: setattr(m.settings, "weight", 2.0),
    "drop .Dropout.: attribute 'p' was 0.0": lambda m, _: setattr(m.drop, "p", 0.5),
    "drop .Dropout. was in training mode": lambda m, _: m.drop.eval(),
    "the ParallelModel: attribute 'tau'": lambda _, p: setattr(p, "tau", 0.7),
    "'last' was set on the ParallelModel": lambda _, p: setattr(p, "last", nn.Linear(8, 5)),
    "the model .Net.: 'last' is another one": lambda m, _: setattr(m, "last", nn.Linear(8, 5)),
    "last .Linear.: 'bias' is another one": lambda m, _: setattr(m.last, "bias", nn.Parameter(torch.ones(5))),
    "last .Linear.: requires_grad of 'weight' was True": lambda m, _: m.last.weight.requires_grad_(False),
    "ParallelModel: requires_grad of 'last.weight' was True": lambda _, p: dict(p.named_parameters())[
        "last.weight"
    ].requires_grad_(False),
}
FREE: dict[str, Change] = {
    "an unread number": lambda m, _: setattr(m, "epoch", 3),
    "an unread setting": lambda m, _: setattr(m.settings, "name", "mean"),
    "a counter of the model": lambda m, _: m(**batch()),
    "an equal value": lambda _, p: setattr(p, "tau", 1.0),
    "another name": lambda _, p: setattr(p, "epoch", 3),
    "the mode of all": lambda m, _: m.eval(),
    "values": lambda m, _: m.load_state_dict(m.state_dict()),
    "memory": lambda m, _: m.to("meta"),
}


@pytest.mark.parametrize("text", READ)
def test_a_change_is_named_at_the_next_step(text: str) -> None:
    model, parallel = made()
    READ[text](model, parallel)
    with pytest.raises(RuntimeInputError, match=text):
        parallel.forward_backward(batch())


def test_what_no_capture_reads_may_change() -> None:
    model, parallel = made()
    for change in FREE.values():
        change(model, parallel)
        parallel.forward_backward(batch())
    del model
    parallel.forward_backward(batch())


def test_an_attribute_that_evaluation_alone_reads() -> None:
    class Scaled(Net):
        scale = 2.0

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x, y) * (1.0 if self.training else self.scale)

    model, parallel = made(Scaled())
    parallel.eval().evaluate(batch())
    model.scale = 3.0
    with pytest.raises(RuntimeInputError, match="attribute 'scale' was"):
        parallel.evaluate(batch())


def test_a_buffer_is_the_remedy() -> None:
    model, parallel = made()
    for heat in (0.5, 3.0):
        parallel.buffer("heat").fill_(heat)
        model.heat.fill_(heat)
        torch.testing.assert_close(parallel.forward_backward(batch()), model(**batch()).detach())


def test_a_model_in_evaluation_mode_trains_as_it_is() -> None:
    model = Net().eval()
    model.drop.p = 0.9
    _, parallel = made(model)
    assert not parallel.training
    torch.testing.assert_close(parallel.forward_backward(batch()), model(**batch()).detach())
    parallel.train()
    assert parallel.forward_backward(batch()) != model(**batch())


def test_a_frozen_part_in_evaluation_mode_stays_so() -> None:
    model = Net().train()
    model.drop.p = 0.9
    model.drop.eval()
    _, parallel = made(model)
    torch.testing.assert_close(parallel.forward_backward(batch()), model(**batch()).detach())


def test_an_optimizer_of_the_module_raises_at_its_step() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    made(model)
    with pytest.raises(RuntimeInputError, match=r"AdamW follows parameters .* nobody steps the parameters"):
        optimizer.step()


def test_both_models_may_train_and_steps_by_hand_go_on() -> None:
    model, parallel = made()
    both = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, parallel)]
    model(**batch()).backward()
    for optimizer in both:
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(3):
        parallel.forward_backward(batch())
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.sub_(0.1 * parameter.grad)
        parallel.zero_grad()


def test_a_schedule_and_an_average_that_follow_the_module() -> None:
    model = Net()
    schedule = ExponentialLR(torch.optim.SGD(model.parameters(), lr=0.1), 0.9)
    average = AveragedModel(model)
    _, parallel = made(model)
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    parallel.forward_backward(batch())
    average.update_parameters(model)
    with pytest.raises(RuntimeInputError, match="AveragedModel follows"):
        parallel.forward_backward(batch())
    del average
    schedule.step()
    with pytest.raises(RuntimeInputError, match="ExponentialLR follows"):
        parallel.forward_backward(batch())


def test_an_optimizer_moves_with_its_groups_and_its_schedule() -> None:
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    loops = []
    for one in (model, reference):
        groups = [{"params": [p for p in one.parameters() if p.dim() == d], "weight_decay": 0.1 * d} for d in (1, 2)]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        loops.append((optimizer, LambdaLR(optimizer, lambda step: 1 / (step + 1))))
    _, parallel = made(model, optimizer=loops[0][0])
    parallel.zero_grad()
    for _ in range(3):
        parallel.forward_backward(batch())
        reference(**batch()).backward()
        for optimizer, schedule in loops:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    expected = dict(reference.named_parameters())
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name].detach())


def test_an_optimizer_that_cannot_move() -> None:
    model = Net()
    with pytest.raises(InputError, match="Adagrad has a state"):
        made(model, optimizer=torch.optim.Adagrad(model.parameters()))
    with pytest.raises(InputError, match="SGD holds a parameter that the model does not have"):
        made(model, optimizer=torch.optim.SGD(Net().parameters(), lr=0.1))
