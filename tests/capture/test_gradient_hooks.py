"""Hooks on gradients and modes of gradients in forward, and reentrant checkpoints."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.errors import CaptureError
from autopar.testing.equivalence import run_model


class Applies(nn.Module):
    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.layer, self.functions = nn.Linear(4, 4), functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for function in self.functions:
            x = function(x)
        return x.square().mean()


BATCH = (torch.randn(2, 4),)


def test_reentrant_checkpoints_keep_their_gradients() -> None:
    program = capture_program(Applies(lambda x: checkpoint(torch.tanh, x, use_reentrant=True)), BATCH)
    target = "aten.tanh.default"
    found = [n for block in program.blocks for n in block.graph.nodes if str(n.target) == target]
    assert [n.meta["info"].differentiable for n in found] == [True]


def scaled(gradient: torch.Tensor) -> torch.Tensor:
    return 0.1 * gradient


def of_node(x: torch.Tensor) -> torch.Tensor:
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(lambda gradients: tuple(map(scaled, gradients)))
    return x


def of_tensor(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(scaled)
    return x


def of_several(x: torch.Tensor) -> torch.Tensor:
    torch.autograd.graph.register_multi_grad_hook((x,), lambda _: None)
    return x


def of_saved(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return x.exp()


@pytest.mark.parametrize("function", [of_node, of_tensor, of_several, of_saved])
def test_hooks_that_forward_sets_are_refused_with_their_line(function: Any) -> None:
    line = "saved_tensors_hooks" if function is of_saved else "register_"
    with pytest.raises(CaptureError, match=rf"test_gradient_hooks.py:\d+: `.*{line}.*` sets a hook on gradients"):
        capture_program(Applies(function), BATCH)


def test_hooks_on_a_module_and_on_a_parameter_are_refused() -> None:
    for of in (lambda m: m.register_full_backward_hook, lambda m: m.weight.register_hook):
        model = Applies()
        model.functions = (lambda x, m=model, of=of: (of(m.layer)(lambda *_: None), x)[1],)
        with pytest.raises(CaptureError, match="sets a hook on gradients in forward"):
            capture_program(model, BATCH)
        assert not model.layer._backward_hooks and not model.layer.weight._backward_hooks


def gradients_of(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
    """The gradients of a captured model, and of the model itself, in float64."""
    model = model.double()
    found = run_model(Request.of(model, inputs)).gradients
    model(*inputs).backward()
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_what_replaces_a_hook_and_lossless_hooks_have_the_same_gradients() -> None:
    def kept(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.t(),), lambda packed: packed[0].t()):
            return x.exp()

    batch = (BATCH[0].double(),)
    replaced, hooked = Applies(lambda x: 0.1 * x + (x - 0.1 * x).detach(), torch.exp), Applies(of_tensor, torch.exp)
    hooked.load_state_dict(replaced.state_dict())
    found, _ = gradients_of(replaced, batch)
    hooked.double()(*batch).backward()
    torch.testing.assert_close(found, {name: p.grad for name, p in hooked.named_parameters()})
    torch.testing.assert_close(*gradients_of(Applies(kept), batch))


class Modes(nn.Module):
    """Values that have no gradient, and one that has a gradient inside of them."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.first, self.second, self.third, self.mode = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), mode

    @torch.inference_mode()
    def frozen(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.mode():
            h = self.first(x)
            with torch.enable_grad():
                h = self.second(h)
        return (self.third(h) * self.frozen(x).clone()).square().mean()


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.set_grad_enabled(False), torch.enable_grad])
def test_modes_of_gradients(mode: Any) -> None:
    found, expected = gradients_of(Modes(mode), (BATCH[0].double(),))
    torch.testing.assert_close(found, expected)
    assert ("first.weight" in expected) == (mode is torch.enable_grad)
