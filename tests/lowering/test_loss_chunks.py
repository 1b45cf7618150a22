"""The loss in chunks: the function against torch's own, what it holds and computes, and where a block has no region."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from one_layer import OneLayer
from step_traffic import Ledger, PricedDim
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autopar._torch import private
from autopar._torch.operators import aten
from autopar.capture.program import capture_program
from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.memory.formula import logit_bytes
from autopar.cost_model.pricing import family_at, layout_of, shape_of_works
from autopar.cost_model.step.block_time import computing_seconds
from autopar.cost_model.work.program_costs import program_works
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.lowering.loss_chunks import loss_in_chunks
from autopar.lowering.loss_region import NO_LOSS, why_whole
from autopar.planning.fixed import choose_labels, label_plan

TOKENS, WIDTH, CLASSES, IGNORE = 22, 6, 10, -7
CHAINS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "none": (),
    "cast": ((aten.to.dtype, torch.float64),),
    "cap": ((aten.div.Tensor, 3.0), (aten.tanh.default,), (aten.mul.Tensor, 3.0)),
    "named": ((aten.gelu.default, {"approximate": "tanh"}),),
}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def targets(tokens: int = TOKENS) -> torch.Tensor:
    found = torch.randint(0, CLASSES, (tokens,), generator=torch.Generator().manual_seed(3))
    found[::5] = IGNORE
    return found


def applied(chain: Any, logits: torch.Tensor) -> torch.Tensor:
    for operator, *arguments in chain:
        options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        logits = operator(logits, *arguments, **options)
    return logits


@pytest.mark.parametrize("chunks", (1, 2, 5, TOKENS, 100))
@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize("chain", CHAINS)
def test_loss_and_gradients_are_those_of_torch(chain: str, has_bias: bool, chunks: int) -> None:
    x, weight, bias = drawn(2, TOKENS // 2, WIDTH), drawn(CLASSES, WIDTH, seed=1), drawn(CLASSES, seed=2)
    tensors = (x, weight, bias) if has_bias else (x, weight)
    logits = applied(CHAINS[chain], functional.linear(x, weight, bias if has_bias else None)).flatten(0, 1)
    expected = functional.cross_entropy(logits, targets(), ignore_index=IGNORE, reduction="sum")
    wanted = torch.autograd.grad(2.5 * expected, tensors)
    given = bias if has_bias else None
    loss = loss_in_chunks(x, targets(), weight, given, chunks, CHAINS[chain], IGNORE, CLASSES, None)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(torch.autograd.grad(2.5 * loss, tensors), wanted, rtol=1e-11, atol=1e-13)


def test_only_wanted_gradients_are_computed() -> None:
    x, weight = drawn(TOKENS, WIDTH), drawn(CLASSES, WIDTH, seed=1)
    for frozen in (x, weight):
        frozen.requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            loss_in_chunks(x, targets(), weight, None, 1, (), IGNORE, CLASSES, None).backward()
        frozen.requires_grad_()
        assert counter.get_total_flops() == 3 * 2 * TOKENS * WIDTH * CLASSES  # forward, again, and one gradient


class Largest(TorchDispatchMode):
    """The most elements of a value with a column for every class, weights left out."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == CLASSES and out.shape[0] != WIDTH:
            self.most = max(self.most, out.numel())
        return out


@pytest.mark.parametrize("chain", ("cast", "cap"))
def test_logits_never_exist_whole(chain: str) -> None:
    x, weight = drawn(20, WIDTH), drawn(CLASSES, WIDTH, seed=1)
    with Largest() as seen:
        loss_in_chunks(x, targets(20), weight, None, 4, CHAINS[chain], IGNORE, CLASSES, None).backward()
    assert seen.most == 5 * CLASSES


def test_in_half_precision_probabilities_have_32_bits() -> None:
    x, weight = (one.detach().bfloat16().requires_grad_() for one in (drawn(20, WIDTH), drawn(CLASSES, WIDTH, seed=1)))
    logits = functional.linear(x, weight).float()
    wanted = torch.autograd.grad(functional.cross_entropy(logits, targets(20), ignore_index=IGNORE, reduction="sum"), x)
    for chain in ((), ((aten.to.dtype, torch.float32),)):
        loss = loss_in_chunks(x, targets(20), weight, None, 4, chain, IGNORE, CLASSES, None)
        assert loss.dtype == (torch.float32 if chain else torch.bfloat16)
        torch.testing.assert_close(torch.autograd.grad(loss, x), wanted, rtol=0.02, atol=0.02)


def test_backward_sends_nothing_but_gathers_of_hidden_states() -> None:
    """Per chunk: a maximum, two sums in one call, and where hidden states are split their gathers and scatter."""
    with private.fake_tensors():
        ledger = Ledger()
        tp = PricedDim("tp", 2, None, 0, 1, ledger)  # type: ignore[arg-type]
        weight = torch.empty(CLASSES // 2, WIDTH, requires_grad=True)
        target = torch.empty(TOKENS, dtype=torch.long)
        for gathered in (None, tp):
            x = torch.empty(2, TOKENS // 2, WIDTH, requires_grad=True)
            own = x if gathered is None else torch.empty(2, TOKENS // 2 // 2, WIDTH, requires_grad=True)
            tokens = target if gathered is None else target[: 2 * 2 * (TOKENS // 2 // 2)]
            loss = loss_in_chunks(own, tokens, weight, None, 5, (), IGNORE, CLASSES, tp, gathered, 1)
            calls = {kind: total.calls for (_, kind), total in ledger.take().items()}
            assert calls == {"all_reduce": 10} | ({} if gathered is None else {"all_gather": 5})
            loss.backward()
            calls = {kind: total.calls for (_, kind), total in ledger.take().items()}
            assert calls == ({} if gathered is None else {"all_gather": 5, "reduce_scatter": 5})


# ---- regions ----


def head(finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Program:
    """Three classes of every second position of a linear layer's result, and a loss of the logits and these targets."""
    target = torch.arange(40) % 6
    model = OneLayer(lambda y: finish(y.reshape(-1, 6), target))
    return capture_program(model, {"x": torch.zeros(4, 10, 6)})


def reason(program: Program, degrees: Degrees) -> str | None:
    found, analysis, labels = choose_labels(program, ClusterSpec.preset(f"{degrees.world_size}xcpu"), degrees)
    return why_whole(program, analysis, labels.blocks, found.mesh)


@pytest.mark.parametrize(
    ("finish", "says"),
    [
        (lambda y, t: functional.cross_entropy(5.0 * torch.tanh(y / 5.0), t), None),
        (lambda y, t: functional.cross_entropy(y.float().view(4, 10, 6).flatten(0, 1), t), None),
        (lambda y, t: functional.cross_entropy(y, t, label_smoothing=0.1), "label smoothing"),
        (lambda y, t: functional.cross_entropy(y, t, weight=torch.arange(6.0), reduction="sum"), "weights of"),
        (lambda y, t: functional.cross_entropy(y, t) + 0.01 * y.logsumexp(-1).square().mean(), "logsumexp.*too"),
        (lambda y, t: functional.cross_entropy(y - y.mean(-1, keepdim=True), t), "no operator on single elements"),
        (lambda y, t: functional.cross_entropy(y.cumsum(-1), t), "no operator on single elements"),
        (lambda y, t: functional.cross_entropy(y.sigmoid() * torch.arange(6.0), t), "no operator on single"),
        (lambda y, t: y.square().mean(), NO_LOSS),
    ],
    ids=["cap", "views", "smoothing", "weights", "z-loss", "centred", "cumsum", "scaled", "none"],
)
def test_a_region_or_why_not(finish: Any, says: str | None) -> None:
    found = reason(head(finish), Degrees(dp_shard=2))
    assert (found is None) is (says is None), found
    assert re.search(says or "", found or "")


def test_a_plan_says_that_its_loss_is_not_in_chunks() -> None:
    program = head(lambda y, t: functional.cross_entropy(y, t, label_smoothing=0.1))
    degrees = Degrees(dp_shard=2, loss_chunks=4)
    plan = label_plan(program, ClusterSpec.preset("2xcpu"), degrees, "smoothed")
    assert any("not computed in chunks (loss_chunks = 4)" in note and "smoothing" in note for note in plan.notes)
    assert not any(
        "chunks" in note for note in label_plan(program, ClusterSpec.preset("2xcpu"), Degrees(dp_shard=2), "").notes
    )


def test_logits_that_the_caller_wants_stay_whole() -> None:
    """The same program without a step: evaluation returns the logits."""
    model, inputs = tiny_models.llama(2)
    program = capture_program(model, inputs)
    assert reason(program, Degrees(tp=2, sequence_parallel=True)) is None
    assert "logits" in program.outputs


# ---- price ----


def test_extra_flop_and_held_logits_are_priced() -> None:
    """One more product of the head, and the logits of a chunk."""
    model, inputs = tiny_models.llama(4)
    program, degrees = capture_program(model, inputs), Degrees(tp=2, sequence_parallel=True)
    found, analysis, labels = choose_labels(program, ClusterSpec.preset("2xh100"), degrees)
    works = {n: program_works(program, analysis, labels.blocks, found.mesh, loss_chunks=n) for n in (1, 4)}
    products = {n: {(p.name, p.kind): p for p in work.family.block("last", "tp").products} for n, work in works.items()}
    (name,) = [name for name, kind in products[4] if kind == "again"]
    whole, part, again = products[1][name, "matmul"], products[4][name, "matmul"], products[4][name, "again"]
    assert part.flops == whole.flops == again.flops
    assert part.m.times(4) == whole.m and part.count == whole.count.times(4)
    assert not works[1].is_chunked and works[4].is_chunked
    layouts = layout_of(works[1], replace(degrees, micro_batch=4))
    engine = engine_named("autopar")
    held = [
        float(logit_bytes(family_at(one, layouts, mechanisms()), shape_of_works(one), layouts, engine)[0])
        for one in works.values()
    ]
    assert held[1] == held[0] / 2 / 4  # one value of 32 bits instead of two
    machine = cluster_machine(ClusterSpec.preset("2xh100"), engine_named("autopar"), mechanisms(), precision="bf16")
    last = family_at(works[4], layouts, mechanisms()).block("last", "tp")

    def seconds(kinds: tuple[str, ...]) -> float:
        own = replace(last, products=tuple(one for one in last.products if one.kind in kinds))
        found = computing_seconds(own, machine.speeds, machine.engine, is_narrow=False)
        return float(np.max(found.products))

    product, with_again = seconds(("matmul",)), seconds(("matmul", "again"))
    assert product * 1.2 < with_again < product * 1.5  # one product more than its three
