"""Folding: equal layers are one block called several times; what differs makes another block or an argument."""

from typing import Any

import tiny_models
import torch
from torch import nn

from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import capture_for
from autopar.runtime.codegen.execute import run_reference
from autopar.testing import check_equivalence


def layers(program: Any) -> list[Any]:
    return [c for c in program.calls if ".layers." in f".{c.path}" or ".h." in c.path]


def test_equal_layers_are_one_block() -> None:
    for count in (2, 5):
        program = capture_program(*tiny_models.llama(2, layers=count))
        assert len(program.blocks) == 4  # denominator, prologue, layer, epilogue
        assert [c.path for c in layers(program)] == [f"model.layers.{i}" for i in range(count)]
        assert len({c.block for c in layers(program)}) == 1


def test_a_scalar_that_differs_is_an_argument() -> None:
    """GPT-2 divides attention by the number of the layer."""
    program = capture_program(*tiny_models.gpt2(2, layers=3))
    calls = layers(program)
    assert len({c.block for c in calls}) == 1
    block = program.blocks[calls[0].block]
    position = [i for i, role in enumerate(block.ports.values()) if role == "scalar"]
    assert len(position) == 1
    scales = [c.arguments[position[0]] for c in calls]
    assert len(set(scales)) == 3
    assert all(isinstance(s, float) for s in scales)


class Uneven(nn.Module):
    """Layers of two widths, alternating."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, w), nn.Tanh(), nn.Linear(w, 4)) for w in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_layers_that_differ_are_blocks_of_their_own() -> None:
    program = capture_program(Uneven((8, 6, 8, 6)), {"x": torch.zeros(2, 4)})
    blocks = [c.block for c in layers(program)]
    assert blocks == [blocks[0], blocks[1]] * 2
    assert blocks[0] != blocks[1]


def test_every_argument_is_made_before_it_is_used() -> None:
    for model in (tiny_models.llama, tiny_models.gpt2, tiny_models.megatron):
        program = capture_program(*model(2))
        known = {i.name for i in program.inputs} | set(program.parameters) | set(program.constants.results)
        for call in program.calls:
            block = program.blocks[call.block]
            assert len(call.arguments) == len(block.ports)
            assert len(call.results) == len(block.outputs)
            assert {a for a in call.arguments if isinstance(a, str)} <= known
            known |= set(call.results)
        assert {program.loss, *program.outputs.values()} <= known


def test_operator_keys_are_unique_and_survive_a_second_trace() -> None:
    first, second = (capture_program(*tiny_models.gpt2(2)) for _ in range(2))
    for a, b in zip(first.blocks, second.blocks, strict=True):
        keys = [n.meta["key"] for n in a.graph.nodes if n.op == "call_function"]
        assert len(set(keys)) == len(keys)
        assert keys == [n.meta["key"] for n in b.graph.nodes if n.op == "call_function"]
    assert first.fingerprint == second.fingerprint


def test_another_model_has_another_fingerprint() -> None:
    prints = {
        capture_program(*tiny_models.llama(2)).fingerprint,
        capture_program(*tiny_models.llama(2, layers=3)).fingerprint,
        capture_program(*tiny_models.llama(4)).fingerprint,
        capture_program(*tiny_models.gpt2(2)).fingerprint,
    }
    assert len(prints) == 4


class CalledAgain(nn.Module):
    """A layer is called again after another one, and the results of both calls meet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        second = self.layers[0](self.layers[1](first))
        return (first - second).square().sum()


def test_the_results_of_a_layer_that_is_called_again_have_names_of_their_own() -> None:
    """The second call must not replace the results of the first one."""
    program = capture_program(CalledAgain(), {"x": torch.zeros(2, 4)})
    assert [c.path for c in layers(program)] == ["layers.0", "layers.1", "layers.0#2"]
    results = [result for c in program.calls for result in c.results]
    assert len(set(results)) == len(results)
    assert check_equivalence(CalledAgain(), {"x": torch.randn(2, 4)}, tp=2).passed


class NumberInName(nn.Module):
    """A stack of layers inside of a module whose own name ends in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.wav2vec2 = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.wav2vec2["layers"]:
            x = layer(x).tanh()
        return x.square().sum()


def test_a_number_in_the_name_of_the_model_hides_no_layers() -> None:
    program = capture_program(NumberInName(), {"x": torch.zeros(2, 4)})
    assert [c.path for c in program.calls if "layers" in c.path] == [f"wav2vec2.layers.{i}" for i in range(3)]


class Capitals(nn.Module):
    """Two inputs whose names differ in case only, beside the usual name of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, X: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * X
        return (x.sum(-1, keepdim=True) + 2 * X).square().sum()


def test_ports_whose_names_differ_in_case_only_hold_their_own_values() -> None:
    model = Capitals().double()
    inputs = {"X": torch.randn(4, 4, dtype=torch.float64), "x": torch.randn(4, 4, dtype=torch.float64)}
    program = capture_program(model, inputs)
    loss = run_reference(program, dict(model.named_parameters()), inputs, {})[program.loss]
    torch.testing.assert_close(loss, model(**inputs), rtol=1e-13, atol=0.0)


class ByName(nn.Module):
    """Modules without numbers, of which one is called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"enter": nn.Linear(4, 8), "cell": nn.Linear(8, 8), "leave": nn.Linear(8, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner["enter"](x)
        for _ in range(4):
            hidden = hidden + self.inner["cell"](hidden).tanh()
        return self.inner["leave"](hidden).square().sum()


class InTwoParts(nn.Module):
    """Two halves at the top, below a module that holds both."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Module()
        self.whole.encoder, self.whole.decoder = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole.decoder(self.whole.encoder(x).relu()).square().sum()


def staged(model: nn.Module, **degrees: int) -> Any:
    """The program of a plan for two ranks."""
    wished = degrees or {"pp": 2}
    return capture_for(Request.of(model, {"x": torch.zeros(2, 4)}), resolve_degrees(wished, 2, 2))


def test_a_pipeline_cuts_a_model_without_numbered_modules_at_its_modules() -> None:
    program = staged(ByName())
    paths = ["inner.enter", "inner.cell", *(f"inner.cell#{n}" for n in (2, 3, 4)), "inner.leave"]
    assert [call.path for call in program.calls] == paths
    assert len({call.block for call in program.calls[1:5]}) == 1 and len(program.blocks) == 3
    assert [call.path for call in staged(InTwoParts()).calls] == ["whole.encoder", "whole.decoder"]
    numbered = staged(Uneven((8, 8)))
    assert [call.path for call in numbered.calls] == [call.path for call in staged(Uneven((8, 8)), tp=2).calls]


def test_without_a_pipeline_it_is_one_block() -> None:
    """An operator split by columns and the next one by rows need no collective between them inside one block."""
    for model in (ByName(), InTwoParts()):
        assert len(staged(model, tp=2).blocks) == 1
