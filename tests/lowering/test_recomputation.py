"""Selective recomputation: any set of recomputed operators gives the same step, and frees what it should free."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from equivalence import case_of, check, labelled
from suites import long
from tiny_models import gpt2, llama, megatron
from torch import fx, nn

from autopar.errors import PlanError
from autopar.ir.plan import BlockLabels
from autopar.ir.sharding import Mesh
from autopar.lowering.functions import conversion_of
from autopar.lowering.local_graph import local_graph
from autopar.lowering.recomputation import SelectiveBlock, recomputed_nodes
from autopar.testing.equivalence import SingleDeviceRun

MESHES = (Mesh.of(), Mesh.of(tp=2), Mesh.of(dp=2, tp=2))
MODELS = {"llama": llama, "gpt2": gpt2, "megatron": partial(megatron, dropout=0.1)}


@cache
def case(name: str) -> SingleDeviceRun:
    return case_of(MODELS[name](2))


def some_recomputed(run: SingleDeviceRun, labels: Sequence[BlockLabels], seed: int) -> tuple[BlockLabels, ...]:
    """Labels that recompute some operators of every block, chosen at random."""
    draw, found = random.Random(seed), []
    for own, block in zip(labels, run.program.blocks, strict=True):
        keys = [node.meta["key"] for node in block.graph.nodes if node.op == "call_function"]
        share = draw.choice((0.2, 0.5, 0.8, 1.0))
        found.append(replace(own, recomputed=tuple(key for key in keys if draw.random() < share)))
    return tuple(found)


@pytest.mark.parametrize("seed", [0, 1, long(2), long(3)])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_any_set_of_operators_equals_one_device(name: str, mesh: Mesh, seed: int) -> None:
    run = case(name)
    labels = some_recomputed(run, labelled(run, mesh, True), seed)
    check(run, labels, mesh, fuse=True, regather=bool(seed % 2))


def test_conversions_that_send_are_not_computed_again() -> None:
    run, mesh, num_sends = case("llama"), Mesh.of(tp=2), 0
    for i, labels in enumerate(labelled(run, mesh, True)):
        graph = local_graph(run.analysis(mesh), run.program.blocks[i], i, labels, mesh).graph
        again = recomputed_nodes(graph, {node.meta["key"] for node in graph.nodes if "key" in node.meta})
        sends = {node for node in graph.nodes if (made := conversion_of(node.target)) and made.wire[0]}
        assert again and not again & sends
        num_sends += len(sends)
    assert num_sends > 0


class Stream:
    """Random numbers of a generator; every use is written down."""

    training = True

    def __init__(self) -> None:
        self.generator, self.drawn = torch.Generator().manual_seed(0), 0

    def position(self) -> tuple[torch.Tensor, int]:
        return self.generator.get_state(), self.drawn

    def go_to(self, position: tuple[torch.Tensor, int]) -> None:
        state, self.drawn = position
        self.generator.set_state(state)

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn += 1
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


def noisy(stream: Stream, x: torch.Tensor) -> torch.Tensor:
    return stream.noise(x)


def block(operators: Sequence[tuple[str, object, Sequence[object]]], **attributes: object) -> fx.GraphModule:
    """A block of (name, function, operands) from inputs x and w; an operand `=name` is an attribute."""
    graph, root = fx.Graph(), nn.Module()
    values: dict[object, object] = {name: graph.placeholder(name) for name in ("x", "w")}
    for name, value in attributes.items():
        setattr(root, name, value)
        values[f"={name}"] = graph.get_attr(name)
    for name, function, operands in operators:
        node = graph.call_function(function, tuple(values.get(one, one) for one in operands), name=name)
        values[name], node.meta["key"] = node, name
    graph.output((values[operators[-1][0]],))
    return fx.GraphModule(root, graph)


class Counted:
    """A function that counts its calls."""

    __name__ = "counted"

    def __init__(self, function: object) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: object) -> object:
        self.calls += 1
        assert callable(self.function)
        return self.function(*arguments)


def gradients(run: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, w = (torch.rand(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    run(x, w)[0].square().sum().backward()
    assert x.grad is not None and w.grad is not None
    return x.grad, w.grad


def test_recomputed_operators_run_once_more_and_others_do_not() -> None:
    calls = {name: Counted(function) for name, function in (("exp", torch.exp), ("mm", torch.mm), ("tanh", torch.tanh))}
    made = block([("exp", calls["exp"], ["x"]), ("mm", calls["mm"], ["exp", "w"]), ("tanh", calls["tanh"], ["mm"])])
    expected = gradients(made)
    for one in calls.values():
        one.calls = 0
    torch.testing.assert_close(gradients(SelectiveBlock(made, ["exp"])), expected, rtol=0, atol=0)
    assert {name: one.calls for name, one in calls.items()} == {"exp": 2, "mm": 1, "tanh": 1}


def test_an_operator_whose_result_nobody_saves_does_not_run_again() -> None:
    calls = Counted(torch.neg)
    made = block([("neg", calls, ["x"]), ("add", torch.add, ["neg", "w"])])
    gradients(SelectiveBlock(made, ["neg"]))
    assert calls.calls == 1


def test_random_operators_draw_the_same_numbers_and_later_ones_go_on() -> None:
    def made() -> fx.GraphModule:
        return block(
            [("exp", torch.exp, ["x"]), ("first", noisy, ["=stream", "exp"]), ("mm", torch.mm, ["first", "w"]),
             ("second", noisy, ["=stream", "mm"]), ("last", torch.mul, ["second", "second"])],
            stream=Stream(),
        )  # fmt: skip

    expected = gradients(made())
    for keys in (["first"], ["second"], ["exp", "first"], ["exp", "first", "mm", "second"]):
        plain = made()
        torch.testing.assert_close(gradients(SelectiveBlock(plain, keys)), expected, rtol=0, atol=0)
        assert plain.stream.drawn == 2  # where the forward pass left the stream


def test_hooks_around_a_block_see_what_it_keeps_and_nothing_else() -> None:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return tensor

    made = block([("big", lambda x: x.expand(100, 8, 8).exp(), ["x"]), ("sin", torch.sin, ["big"])])
    x, w = torch.rand(8, 8, requires_grad=True), torch.rand(8, 8)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (out,) = SelectiveBlock(made, ["big"])(x, w)
    assert seen == [64]  # of x alone: `exp` saves its result, and `sin` its input
    out.sum().backward()
    torch.testing.assert_close(x.grad, 100 * x.exp().cos() * x.exp())


def test_a_second_backward_pass_over_a_kept_graph_gives_the_same_gradients() -> None:
    made = SelectiveBlock(block([("exp", torch.exp, ["x"]), ("mm", torch.mm, ["exp", "w"])]), ["exp"])
    x, w = (torch.rand(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = made(x, w)[0].square().sum()
    once = torch.autograd.grad(loss, (x, w), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), once, rtol=0, atol=0)


def test_a_result_that_is_freed_before_its_next_reader_is_there() -> None:
    """`exp` is read by a recomputed view, which is gone at once, and later by an operator that saves it."""
    made = block(
        [("exp", torch.exp, ["x"]), ("mm", torch.mm, ["w", "w"]), ("view", torch.t, ["exp"]),
         ("sum", torch.add, ["mm", "view"]), ("last", torch.mul, ["sum", "exp"])]
    )  # fmt: skip
    expected = gradients(made)
    torch.testing.assert_close(gradients(SelectiveBlock(made, ["exp", "view"])), expected, rtol=0, atol=0)


def test_an_unknown_operator_is_refused() -> None:
    made = block([("exp", torch.exp, ["x"]), ("mm", torch.mm, ["exp", "w"])])
    with pytest.raises(PlanError, match="names the operator 'exq', which the block does not run; did you mean 'exp'"):
        SelectiveBlock(made, ["exq"])


def test_a_view_of_a_recomputed_result_is_that_part_of_it() -> None:
    """Products save transposed and cut views of the result of `exp`."""
    made = block(
        [("exp", torch.exp, ["x"]), ("t", torch.t, ["exp"]), ("mm", torch.mm, ["t", "w"]),
         ("cut", torch.narrow, ["exp", 0, 2, 4]), ("last", torch.mm, ["cut", "mm"])]
    )  # fmt: skip
    expected = gradients(made)
    torch.testing.assert_close(gradients(SelectiveBlock(made, ["exp"])), expected, rtol=0, atol=0)


def test_the_inputs_of_a_part_that_never_runs_again_are_not_kept() -> None:
    """So offload does not move them. The second case has a part whose only reader never runs again."""
    for keys in (["neg"], ["neg", "half"]):
        seen: list[int] = []
        made = block(
            [("mm", torch.mm, ["x", "w"]), ("neg", torch.neg, ["mm"]), ("more", torch.add, ["neg", "w"]),
             ("half", lambda x: x * 0.5, ["neg"]), ("last", torch.add, ["half", "more"])],
        )  # fmt: skip
        x, w = (torch.rand(8, 8, requires_grad=True) for _ in range(2))

        def note(one: torch.Tensor, at: list[int] = seen) -> torch.Tensor:
            at.append(one.data_ptr())
            return one

        with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
            SelectiveBlock(made, keys)(x, w)
        assert sorted(seen) == sorted([x.data_ptr(), w.data_ptr()])
