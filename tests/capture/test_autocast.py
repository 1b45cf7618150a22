"""Models under `torch.autocast`: the captured program has the casts, so loss and gradients have equal bits."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.ir.program import Program
from autopar.runtime.codegen.execute import run_reference

Results = dict[str, torch.Tensor]
Finish = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two equal layers with a norm, a product and a softmax. `dtype` is that of autocast inside `forward`, if any."""

    def __init__(self, dtype: torch.dtype | None = None, *, exact_layers: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.dtype, self.exact_layers = dtype, exact_layers

    def body(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.exact_layers:
            with torch.autocast("cpu", enabled=False):
                h = self.hidden(h.float())
        else:
            h = self.hidden(h)
        return self.last(h.softmax(-1))

    def hidden(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = h + layer(h)
        return h

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Results:
        if self.dtype is None:
            out = self.body(x)
        else:
            with torch.autocast("cpu", dtype=self.dtype):
                out = self.body(x)
        return {"loss": F.mse_loss(out.float(), target), "out": out}


class Finished(nn.Module):
    """A linear layer and the operator `finish` in a region of autocast. The loss is the sum of squares."""

    def __init__(self, finish: Finish | nn.Module) -> None:
        super().__init__()
        self.layer, self.finish = nn.Linear(6, 6), finish

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.finish(self.layer(x)).float().square().sum()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def inputs() -> Results:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(4, 8, generator=generator) for name in ("x", "target")}


def eager(model: nn.Module, batch: Results, around: torch.dtype | None = None) -> tuple[torch.Tensor, Results]:
    """The loss and the gradients of the model itself. The backward pass is outside autocast, as torch asks for it."""
    with torch.autocast("cpu", dtype=around, enabled=around is not None):
        found = model(**batch)
    loss: torch.Tensor = found["loss"] if isinstance(found, dict) else found
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def captured(program: Program, model: nn.Module, batch: Results) -> tuple[torch.Tensor, Results]:
    """The loss and the gradients of a captured program with the model's parameters."""
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    loss = run_reference(program, parameters, batch, dict(model.named_buffers()))[program.loss]
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in parameters.items() if p.grad is not None}


def dtypes_of_linears(program: Program) -> set[torch.dtype]:
    nodes = [node for block in program.blocks for node in block.graph.nodes]
    return {n.meta["info"].dtype for n in nodes if n.target is torch.ops.aten.linear.default}


def same_bits(model: nn.Module, program: Program, batch: Results, around: torch.dtype | None = None) -> None:
    """Eager and captured runs have equal bits. `around` is the dtype of autocast around the eager call, if any."""
    loss, gradients = eager(model, batch, around)
    found, found_gradients = captured(program, model, batch)
    assert torch.equal(loss, found)
    assert gradients.keys() == found_gradients.keys()
    assert not [n for n, g in gradients.items() if not torch.equal(g, found_gradients[n])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_region_in_forward(dtype: torch.dtype) -> None:
    model = seeded(lambda: Net(dtype))
    program = capture_program(model, inputs())
    assert {dtype} == dtypes_of_linears(program)
    same_bits(model, program, inputs())


def test_autocast_around_the_capture() -> None:
    """Training and eval mode have the casts, and autocast is on again after the capture."""
    model = seeded(Net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = capture_program(model, inputs())
        evaluated = capture_program(model, inputs(), training=False)
        assert torch.is_autocast_enabled("cpu")
    assert {torch.bfloat16} == dtypes_of_linears(program) == dtypes_of_linears(evaluated)
    same_bits(model, program, inputs(), around=torch.bfloat16)


def test_casts_change_the_loss() -> None:
    """A capture without autocast is float32, and its loss differs: the comparisons above can fail."""
    model = seeded(Net)
    program = capture_program(model, inputs())
    assert {torch.float32} == dtypes_of_linears(program)
    same_bits(model, program, inputs())
    loss, _ = eager(model, inputs(), torch.bfloat16)
    assert not torch.equal(loss, captured(program, model, inputs())[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_an_inner_region_turns_autocast_off(dtype: torch.dtype | None) -> None:
    """The region around it is in `forward`, or around the capture."""
    model = seeded(lambda: Net(dtype, exact_layers=True))
    around = torch.bfloat16 if dtype is None else None
    with torch.autocast("cpu", dtype=around, enabled=around is not None):
        program = capture_program(model, inputs())
    assert {torch.bfloat16, torch.float32} == dtypes_of_linears(program)
    same_bits(model, program, inputs(), around=around)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_model_on_meta(dtype: torch.dtype | None) -> None:
    """Autocast has no effect on meta tensors, but the casts are captured, also from a region around the capture."""
    with torch.device("meta"):
        empty = Net(dtype)
    around = torch.bfloat16 if dtype is None else None
    with torch.autocast("cpu", dtype=around, enabled=around is not None):
        program = capture_program(empty, inputs())
    assert all(parameter.is_meta for parameter in empty.parameters())
    same_bits(seeded(lambda: Net(dtype)), program, inputs(), around=around)


def test_a_model_on_meta_that_cannot_be_copied() -> None:
    with torch.device("meta"):
        model = Net(torch.bfloat16)
    model.lock = threading.Lock()
    with pytest.raises(CaptureError, match=r"on meta, where torch.autocast has no effect.*build the model on a device"):
        capture_program(model, inputs())


def ctc(y: torch.Tensor) -> torch.Tensor:
    targets, length, target_length = torch.ones(1, 2, dtype=torch.long), torch.tensor([4]), torch.tensor([2])
    return F.ctc_loss(y.view(4, 1, 6).log_softmax(-1), targets, length, target_length)


OPERATORS: dict[str, Finish] = {
    "concatenation of two dtypes": lambda y: torch.cat([y, y.float()]),
    "scaled_dot_product_attention": lambda y: F.scaled_dot_product_attention(*(y.view(1, 2, 2, 6),) * 3),
    "cross_entropy": lambda y: F.cross_entropy(y, torch.arange(4)),
    "norm": lambda y: torch.linalg.norm(y, dim=1),
    "ctc_loss, traced twice": ctc,
    "writing into a piece": lambda y: torch.zeros(4, 6).index_put((torch.arange(4),), y.float()).add_(1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_each_kind(name: str) -> None:
    """Operators that autocast runs in 16 bits, in float32, or in the widest dtype of their operands."""
    model = seeded(lambda: Finished(OPERATORS[name]))
    batch = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}
    same_bits(model, capture_program(model, batch), batch)


class InFloat32(nn.RMSNorm):
    """The remedy of the refusal: the operator runs in a block without autocast."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(y.float())


def test_casts_inside_an_operator_are_refused() -> None:
    """The message names operator, module and remedy, and the remedy captures with equal bits."""
    batch = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}
    with pytest.raises(CaptureError) as refusal:
        capture_program(seeded(lambda: Finished(nn.RMSNorm(6))), batch)
    for text in ("casts values inside aten.rms_norm", "(module 'model.finish')", "enabled=False", "precision"):
        assert text in str(refusal.value)
    model = seeded(lambda: Finished(InFloat32(6)))
    same_bits(model, capture_program(model, batch), batch)


def test_a_parameter_of_two_calls() -> None:
    """Autocast casts it once and adds its gradients in 16 bits. The program casts it twice and adds them in float32."""
    model: Any = seeded(lambda: Finished(nn.Identity()))
    model.finish = model.layer
    batch = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}
    program = capture_program(model, batch)
    loss, gradients = eager(model, batch)
    found, found_gradients = captured(program, model, batch)
    assert torch.equal(loss, found)
    for name, gradient in gradients.items():
        assert (found_gradients[name] - gradient).norm() <= 2**-8 * gradient.norm(), name
